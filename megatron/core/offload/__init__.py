"""Offload of activations and weights to host memory, and the memory pool and copy engine that all offload uses."""
