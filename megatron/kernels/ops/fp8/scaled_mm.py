"""Products of quantized matrices by torch.

On CUDA both operands are contiguous along the contraction. Its length and the number of columns are multiples of 16, or
of whole blocks: where the last block is smaller, torch's checks disagree on the number of scales. Scales of 128
elements need cuBLAS >= 12.9 and a Hopper GPU, MXFP8 needs a Blackwell one. On the CPU torch multiplies matrices with
one scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron.base.errors import first_line
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS, Formats
from megatron.kernels.ops.fp8.operands import Operands, blockwise, mxfp8, tensorwise
from megatron.kernels.ops.fp8.quantize import MICRO, SQUARE, VECTOR, Quantized

RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
_MULTIPLE = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}
_TRIAL = 256  # rows and columns of matrices
# Of the largest element: both are rounded to bf16, and the sums of a GPU may have 14 bits.
_TOLERANCE = 2.0**-7


# Adds a [m, k] @ b [n, k].t(), operands that are ready, to the first argument [m, n], fp32 and contiguous.
AddProduct = Callable[[Tensor, Quantized, Quantized], None]


class ScaledMM:
    """See Product."""

    def __init__(self, recipe: str, add: AddProduct | None = None) -> None:
        """`recipe` is the recipe of all operands. Without `add` a product is written first, and then added."""
        self.multiple = _MULTIPLE[recipe]
        self._add = add

    def ready(self, q: Quantized) -> Quantized:
        """See Product."""
        if q.block == VECTOR:
            return q._replace(inverse=q.inverse.t().contiguous().t())
        if q.block == SQUARE:
            # The factors of a row of blocks lie next to each other, in multiples of 16 bytes.
            padding = -q.inverse.shape[1] % 4
            return q._replace(inverse=(F.pad(q.inverse, (0, padding)) if padding else q.inverse).t())
        if q.block == MICRO:
            return q._replace(inverse=swizzled(q.inverse))
        return q

    def __call__(self, a: Quantized, b: Quantized, out: Tensor, *, fast: bool, bias: Tensor | None = None) -> None:
        """See Product. Sums of blocks are precise, `fast` or not."""
        inside = bias if out.dtype != torch.float32 else None  # the kernel adds none to an fp32 result
        if a.block is None:
            torch._scaled_mm(
                a.data,
                b.data.t(),
                a.inverse,
                b.inverse,
                bias=inside,
                out_dtype=out.dtype,
                use_fast_accum=fast,
                out=out,
            )
        else:
            kinds, order = zip(_kind(a), _kind(b), strict=True)
            torch._scaled_mm_v2(
                a.data,
                b.data.t(),
                [a.inverse],
                kinds[:1],
                order[:1],
                [b.inverse],
                kinds[1:],
                order[1:],
                inside,
                out.dtype,
                out=out,
            )
        if bias is not None and inside is None:
            out.add_(bias)

    def add(self, a: Quantized, b: Quantized, out: Tensor) -> None:
        """See Product."""
        if self._add is not None:
            self._add(out, a, b)
            return
        product = torch.empty_like(out)
        self(a, b, product, fast=False)
        out.add_(product)


def swizzled(factors: Tensor) -> Tensor:
    """[m, n] -> the flat order of MXFP8's factors on GPUs: tiles of 128 rows and 4 columns, filled up with zeros. In a
    tile, the factors of rows 32 apart lie next to each other (cuBLAS: "1D block scaling factors layout").
    """
    m, n = factors.shape
    tiles = F.pad(factors.view(torch.uint8), (0, -n % 4, 0, -m % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(factors.dtype)


def size_problem(name: str, out_features: int, in_features: int, recipe: str) -> str | None:
    """Returns why torch cannot multiply a layer's local weight [out, in], or None."""
    multiple = _MULTIPLE[recipe]
    if out_features % multiple == 0 and in_features % multiple == 0:
        return None
    return (
        f"{name}: its weight is [{out_features}, {in_features}] on a rank, and {recipe} FP8 needs multiples of "
        f"{multiple}"
    )


def why_not(recipe: str, device: torch.device, formats: str) -> str | None:
    """Returns why torch cannot multiply matrices of a recipe here, or None if it can: they are tried.

    formats: a name in FORMATS.
    """
    missing = _missing(recipe, device)
    if missing is not None or isinstance(torch.empty(0), FakeTensor):  # --dry-run: there is nothing to compare
        return missing
    try:
        _try(recipe, device, FORMATS[formats])
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"torch {torch.__version__} cannot multiply {recipe} FP8 here: {first_line(error)}"
    return None


def _missing(recipe: str, device: torch.device) -> str | None:
    blocks = recipe in ("blockwise", "mxfp8")
    if device.type != "cuda":
        return f"torch multiplies {recipe} FP8 on CUDA only" if blocks else None
    major, minor = torch.cuda.get_device_capability(device)
    capability = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    if (major, minor) < (8, 9):
        return f"FP8 needs a GPU of compute capability 8.9 or more, {capability}"
    if recipe == "blockwise" and major != 9:
        return f"blockwise needs a GPU of compute capability 9.0, {capability}"
    if recipe == "mxfp8" and major < 10:
        return f"mxfp8 needs a GPU of compute capability 10.0 or more, {capability}"
    return None


def _try(recipe: str, device: torch.device, formats: Formats) -> None:
    """Raises RuntimeError if a product of each kind is not close to the emulation."""
    numbers = torch.arange(_TRIAL * _TRIAL, device=device, dtype=torch.float32).view(_TRIAL, _TRIAL)
    x, weight = numbers.mul(0.7).sin_().bfloat16(), numbers.mul(1.1).sin_().bfloat16()
    emulated, product = Emulated(), ScaledMM(recipe)
    operands = {"blockwise": blockwise, "mxfp8": mxfp8}.get(recipe, tensorwise)(formats)
    for a, b in _pairs(operands, x, weight):
        actual, expected = (torch.empty(_TRIAL, _TRIAL, device=device, dtype=torch.bfloat16) for _ in range(2))
        emulated(a, b, expected, fast=False)
        product(product.ready(a), product.ready(b), actual, fast=False)
        if not bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise RuntimeError("the products are wrong")


def _pairs(operands: Operands, x: Tensor, weight: Tensor) -> list[tuple[Quantized, Quantized]]:
    """Returns the operands of the three products."""
    inputs, weights, grads = (
        operand(y, rows=True, columns=True) for operand, y in zip(operands, (x, weight, x), strict=True)
    )
    pairs = (inputs.rows, weights.rows), (grads.rows, weights.columns), (grads.columns, inputs.columns)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _kind(q: Quantized) -> tuple[int, int]:
    """Returns how torch calls the blocks, and the order of their factors."""
    assert q.block is not None
    names = {VECTOR: "BlockWise1x128", SQUARE: "BlockWise128x128", MICRO: "BlockWise1x32"}
    order = F.SwizzleType.SWIZZLE_32_4_4 if q.block == MICRO else F.SwizzleType.NO_SWIZZLE
    return getattr(F.ScalingType, names[q.block]).value, order.value
