"""Attention over a sequence that is cut between the ranks of a group."""
