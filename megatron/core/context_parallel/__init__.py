"""Attention over a sequence that is sharded between the ranks of a group."""
