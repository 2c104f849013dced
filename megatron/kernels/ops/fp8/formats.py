"""The two FP8 formats: e4m3 (4 bits of exponent, 3 of mantissa) and e5m2. Micikevicius et al., arXiv 2209.05433.

e4m3 has no infinity, and its largest number is 448; e5m2 has one, and its largest number is 57344.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# A larger scale has an inverse below the smallest normal fp32 number, which GPUs may take as zero.
LARGEST_SCALE = 2.0**126


class Formats(NamedTuple):
    """`forward` is the format of inputs and weights, `gradient` that of the gradients of outputs."""

    forward: torch.dtype
    gradient: torch.dtype


# By the value of --fp8-format. Gradients vary more between elements than activations, so hybrid gives them the wider
# range.
FORMATS = {"e4m3": Formats(E4M3, E4M3), "hybrid": Formats(E4M3, E5M2)}


def largest(dtype: torch.dtype) -> float:
    """Returns the largest finite number of a format."""
    return torch.finfo(dtype).max


def largest_power(dtype: torch.dtype) -> float:
    """Returns the largest power of two of a format."""
    return {E4M3: 2.0**8, E5M2: 2.0**15}[dtype]
