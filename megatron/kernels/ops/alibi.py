"""Attention with linear biases (ALiBi; Press et al., arXiv 2108.12409) as further channels of queries and keys.

A head adds slope x (position of the key - position of the query) to a score. The part of the query is the same for all
of its keys, so it falls out of the softmax. The part of the key is a product: slope x position. So it is written into
channels behind those of a head, and every kernel, exchange and cache of attention computes it without knowing of it.

Half precision does not hold positions above 256, nor most slopes. So a position is two digits of eight bits, and a
slope is the sum of three numbers of eight bits, which bf16, fp16, TF32 and fp32 all hold. Their products are added up
in fp32. Channels of a key: (high, high, high, 0, low, low, low, 0). Those of a query: the three numbers times 256, 0,
the three numbers, 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.spec.attention import ALIBI_CHANNELS

_DIGIT, _NUMBERS = 256, 3
_HALF = ALIBI_CHANNELS // 2


def position_channels(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the channels of keys, the high and the low digit [s, b or 1, 1, 4], for positions [b or 1, s]."""
    channels = torch.arange(_HALF, device=positions.device) < _NUMBERS
    high, low = (
        (digit.t()[..., None, None] * channels).to(dtype) for digit in (positions // _DIGIT, positions % _DIGIT)
    )
    return high, low


def slope_channels(slopes: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the channels of the queries of heads with these slopes, [heads, 8]."""
    remainder = torch.tensor(slopes, dtype=torch.float64)
    channels = torch.zeros(len(slopes), ALIBI_CHANNELS, dtype=torch.float64)
    for number in range(_NUMBERS):
        part = remainder.to(torch.bfloat16).double()
        channels[:, number], channels[:, _HALF + number] = _DIGIT * part, part
        remainder = remainder - part
    return channels.to(device=device, dtype=dtype)


def with_channels(x: Tensor, channels: Sequence[Tensor]) -> Tensor:
    """Returns x [s, b, heads, d] with channels [.., heads or 1, c] behind its own."""
    return torch.cat((x, *(part.expand(*x.shape[:3], -1) for part in channels)), dim=-1)
