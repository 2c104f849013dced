"""Checkpoints of global tensors that load under any layout."""
