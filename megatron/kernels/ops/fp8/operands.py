"""How the three operands of a linear layer get their scales: input, weight and gradient of the output.

`delayed` takes them from the magnitudes of earlier steps, `tensorwise` from the matrix itself, `blockwise` and `mxfp8`
from each block. The scales of a run must not depend on its layout. The scales of blocks do not, `delayed` is given its
scales, and `tensorwise` calls `max_over` for an operand that other ranks hold parts of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.ops.fp8.formats import Formats
from megatron.kernels.ops.fp8.quantize import (
    MICRO,
    SEPARATE,
    SQUARE,
    VECTOR,
    BlockShape,
    Both,
    QuantizeKernels,
)

# Raises amaxes (see Amaxes) in place to the largest ones of the ranks that hold parts of the operand.
MaxOver = Callable[[Tensor], None]


class Operand(Protocol):
    """Quantizes one operand of one layer."""

    def __call__(self, x: Tensor, *, rows: bool, columns: bool) -> Both:
        """x [n, k]."""
        ...

    def in_pieces(self) -> Operand:
        """Quantizes some rows of the operand at a time."""
        ...


class Operands(NamedTuple):
    """The operands of a layer; `gradient` quantizes the gradient of its output."""

    input: Operand
    weight: Operand
    gradient: Operand


@dataclass(frozen=True)
class Delayed:
    """scale, amax: fp32 [1], owned by the training state. Every call raises amax to the largest magnitude of x."""

    scale: Tensor
    amax: Tensor
    dtype: torch.dtype
    kernels: QuantizeKernels = SEPARATE

    def __call__(self, x: Tensor, *, rows: bool, columns: bool) -> Both:
        """See Operand."""
        return self.kernels.per_tensor(x, self.scale, self.dtype, rows=rows, columns=columns, amax=self.amax)

    def in_pieces(self) -> Delayed:
        """See Operand."""
        return self


@dataclass(frozen=True)
class Tensorwise:
    """margin: powers of two that stay free above the largest magnitude. Communication: `max_over` in every call."""

    dtype: torch.dtype
    margin: int = 0
    max_over: MaxOver | None = None
    kernels: QuantizeKernels = SEPARATE

    def __call__(self, x: Tensor, *, rows: bool, columns: bool) -> Both:
        """See Operand."""
        amaxes = self.kernels.amaxes(x)
        if self.max_over is not None:
            self.max_over(amaxes)
        return self.kernels.by_amaxes(x, amaxes, self.dtype, self.margin, rows=rows, columns=columns)

    def in_pieces(self) -> Tensorwise:
        """Each piece by its own magnitude, and without communication: others are multiplied before all have arrived."""
        return replace(self, max_over=None)


@dataclass(frozen=True)
class Blockwise:
    """block: along the contraction, in both directions."""

    block: BlockShape
    dtype: torch.dtype
    kernels: QuantizeKernels = SEPARATE

    def __call__(self, x: Tensor, *, rows: bool, columns: bool) -> Both:
        """See Operand."""
        return self.kernels.per_block(x, self.block, self.dtype, rows=rows, columns=columns)

    def in_pieces(self) -> Blockwise:
        """See Operand."""
        return self


Three = tuple[Tensor, Tensor, Tensor]  # of input, weight and gradient


def delayed(formats: Formats, scales: Three, amaxes: Three, kernels: QuantizeKernels = SEPARATE) -> Operands:
    """scales, amaxes: fp32 [1] each, see Delayed."""
    operands = (Delayed(*of, kernels) for of in zip(scales, amaxes, _dtypes(formats), strict=True))
    return Operands(*operands)


def tensorwise(
    formats: Formats,
    margin: int = 0,
    max_over: tuple[MaxOver | None, MaxOver | None, MaxOver | None] = (None, None, None),
    kernels: QuantizeKernels = SEPARATE,
) -> Operands:
    """margin, max_over: see Tensorwise; max_over of input, weight and gradient."""
    operands = (
        Tensorwise(dtype, margin, over, kernels) for dtype, over in zip(_dtypes(formats), max_over, strict=True)
    )
    return Operands(*operands)


def blockwise(formats: Formats, kernels: QuantizeKernels = SEPARATE) -> Operands:
    """Vectors of activations and gradients, and squares of weights."""
    blocks = (VECTOR, SQUARE, VECTOR)
    return Operands(*(Blockwise(block, of, kernels) for block, of in zip(blocks, _dtypes(formats), strict=True)))


def mxfp8(formats: Formats, kernels: QuantizeKernels = SEPARATE) -> Operands:
    """Vectors of 32 elements of each operand."""
    return Operands(*(Blockwise(MICRO, dtype, kernels) for dtype in _dtypes(formats)))


def _dtypes(formats: Formats) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    return formats.forward, formats.forward, formats.gradient
