"""Reads, checks and explains command lines, before torch is imported."""
