"""The sum of squares of a flat tensor, for the norm of a gradient.

The elements of a row of 64 are summed in fp32, and the rows in fp64: their order changes the sixteenth digit only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.spec.buckets import NORM_ROW
from megatron.spec.work_space import ROUNDED_AT_ONCE

SquareSum = Callable[[Tensor], Tensor]  # fp32 or bf16 [n] -> fp64 [], on the same device


def square_sum(x: Tensor) -> Tensor:
    """The reference: see SquareSum. bf16 is converted block by block."""
    if x.dtype != torch.float32:
        blocks = x.split(ROUNDED_AT_ONCE[x.device.type])
        return torch.stack([square_sum(block.float()) for block in blocks]).sum()
    if short := -x.numel() % NORM_ROW:
        x = F.pad(x, (0, short))
    return torch.linalg.vector_norm(x.view(-1, NORM_ROW), dim=1).double().square_().sum()
