"""Sizes of the kernels' work space, which the kernels use and the memory plan counts."""

from __future__ import annotations

# Elements of the loss's fp32 work space: small enough for a CPU core's cache, large enough to fill a GPU.
CROSS_ENTROPY_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
# Elements of the probabilities that attention in blocks holds at a time where it drops them.
ATTENTION_MATRIX = 1 << 24

# Elements that are rounded at random at a time: the work space fits a CPU core's cache, or keeps a GPU busy.
ROUNDED_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
# Bytes of work space for each of them: random bits, and which values are finite, or 64-bit indices where they are not
# consecutive.
BITS_OF_ROWS, BITS_OF_COLUMNS = 10, 24

# Tokens of prompts that generation reads in one forward; a longer prompt is read alone.
PROMPT_TOKENS = 4096
