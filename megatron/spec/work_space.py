"""Sizes of the kernels' work space, which the kernels use and the memory plan counts."""

from __future__ import annotations

# Elements of the loss's fp32 work space: small enough for a CPU core's cache, large enough to fill a GPU.
CROSS_ENTROPY_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
# Elements of the probabilities that attention in blocks holds at a time where it drops them.
ATTENTION_MATRIX = 1 << 24
