"""The programs that measure README's figures. Each prints one table."""
