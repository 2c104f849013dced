"""Tensors as matrices of rows, which the kernels read."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor, width: int) -> Tensor:
    """Returns x as [n, width] with adjacent columns: a view where its strides allow one, else a copy."""
    flat = x.reshape(-1, width)
    return flat if flat.stride(1) == 1 else flat.contiguous()
