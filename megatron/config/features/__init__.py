"""The start-up table: each feature as requested and as in effect, and the reason where they differ."""
