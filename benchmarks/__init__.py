"""What README's figures come from. Each program prints one table."""
