"""The statistics of the loss in blocks of a fixed number of rows: see [Note: fixed shapes] in the package."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.ops import cross_entropy
from megatron.kernels.ops.cross_entropy import CrossEntropyKernel

_ROWS = 8  # of a block: it is read three times, and has as many columns as the vocabulary


def local_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """See `cross_entropy.local_statistics`. A block is contiguous: the order of a sum follows from the strides, too, and
    logits that generation has gathered over tp lie column by column."""
    n = len(logits)
    parts = [
        cross_entropy.local_statistics(
            F.pad(logits[start : start + _ROWS], (0, 0, 0, missing)).contiguous(),
            F.pad(targets[start : start + _ROWS], (0, missing)),
            first,
        )
        for start in range(0, n, _ROWS)
        for missing in [max(0, start + _ROWS - n)]
    ]
    return torch.cat(parts, dim=1)[:, :n] if parts else cross_entropy.local_statistics(logits, targets, first)


KERNEL = CrossEntropyKernel(local_statistics, cross_entropy.gradient_)
