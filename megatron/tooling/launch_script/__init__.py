"""Reads launch scripts without running them: the training commands that they start. No torch."""
