"""Finds the fastest layouts of a run that fit into memory."""
