"""Tensor-parallel layers, loss and random state."""
