"""Kernels of NVIDIA's Transformer Engine, as functions: its modules would hold parameters and communicate
themselves."""
