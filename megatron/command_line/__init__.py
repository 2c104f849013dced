"""Reads, checks and explains command lines and launch scripts, before torch is imported."""
