"""Products of rows with the matrices of their experts.

M rows; A assignments of a row to an expert, sorted by expert; E experts of this rank. A row may have any number of
experts, so operands with M rows are gathered, and results for the same row are added: in ascending order of the experts
and in fp32, rounded once. So two runs have the same bits on every device, and no copy of all rows is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.base.errors import first_line
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.gemm import slow_half
from megatron.kernels.ops.weight_grad import WeightGrad

_ALIGNMENT = 16  # bytes; of the distance between rows of a matrix, for torch's grouped product


class GroupedGemm(Protocol):
    """Operands and results are in the model's dtype. matrices: [E, in, out] with any strides. Not differentiable."""

    def gather_product(self, rows: Tensor, assignments: Assignments, matrices: Tensor) -> Tensor:
        """rows [M, in] -> each assignment's row times its expert's matrix, [A, out]."""
        ...

    def product_sum(self, values: Tensor, assignments: Assignments, matrices: Tensor, count: int) -> Tensor:
        """values [A, in] -> each assignment's value times its expert's matrix, added up per row: [M = count, out]."""
        ...


class Loop:
    """The reference, and the version for CPUs: one product per expert that has rows.

    Half-precision products run in fp32 where that is faster (gemm.py).
    """

    def gather_product(self, rows: Tensor, assignments: Assignments, matrices: Tensor) -> Tensor:
        """See GroupedGemm."""
        gathered, dtype = Gather(rows, assignments), _product_dtype(rows)
        out = rows.new_empty(len(assignments.rows), matrices.shape[-1])
        for expert, (matrix, result) in enumerate(zip(matrices.unbind(), out.split(assignments.sizes), strict=True)):
            if len(result) and dtype == out.dtype:
                torch.mm(gathered(expert), matrix, out=result)
            elif len(result):
                result.copy_(gathered(expert).to(dtype) @ matrix.to(dtype))
        return out

    def product_sum(self, values: Tensor, assignments: Assignments, matrices: Tensor, count: int) -> Tensor:
        """See GroupedGemm."""
        (rows, sizes), dtype, width = assignments, _product_dtype(values), matrices.shape[-1]
        sum_dtype = torch.promote_types(values.dtype, torch.float32)
        total = torch.zeros(count, width, dtype=sum_dtype, device=values.device)
        scratch = torch.empty(max(sizes, default=0), width, dtype=dtype, device=values.device)
        for places, value, matrix in zip(rows.split(sizes), values.split(sizes), matrices.unbind(), strict=True):
            if len(places):
                product = torch.mm(value.to(dtype), matrix.to(dtype), out=scratch[: len(places)])
                total.index_add_(0, places, product.to(sum_dtype))  # deterministic: no row is there twice
        return total.to(values.dtype)


class Grouped:
    """One product of torch (`grouped_mm`) for all experts, with a temporary copy of the gathered rows."""

    def gather_product(self, rows: Tensor, assignments: Assignments, matrices: Tensor) -> Tensor:
        """See GroupedGemm."""
        return _grouped(rows.index_select(0, assignments.rows), matrices, assignments.sizes)

    def product_sum(self, values: Tensor, assignments: Assignments, matrices: Tensor, count: int) -> Tensor:
        """See GroupedGemm. Each product is rounded to the model's dtype before the sum."""
        products = _grouped(values, matrices, assignments.sizes)
        rows, order = assignments.rows.sort(stable=True)
        starts = torch.searchsorted(rows, torch.arange(count, device=rows.device))
        # Adds the products of a row one after the other, in this order; index_add_ of all experts at once would not.
        return F.embedding_bag(order, products, starts, mode="sum")


class Gather:
    """The rows of one expert after the other. A result is valid until the next call: they share memory."""

    def __init__(self, rows: Tensor, assignments: Assignments) -> None:
        self._rows, self._assignments = rows, assignments
        self._places: tuple[Tensor, ...] = ()
        self._scratch: Tensor | None = None  # not before the first call, which may be much later

    def __call__(self, expert: int) -> Tensor:
        """[assignments of the expert, in]."""
        if self._scratch is None:
            sizes = self._assignments.sizes
            self._places = self._assignments.rows.split(sizes)
            self._scratch = self._rows.new_empty(max(sizes), self._rows.shape[-1])
        places = self._places[expert]
        return torch.index_select(self._rows, 0, places, out=self._scratch[: len(places)])


def write_weight_grad(
    main_grad: Tensor,
    grad_of: Callable[[int], Tensor],
    x_of: Callable[[int], Tensor],
    sizes: Sequence[int],
    kernel: WeightGrad,
    overwrite: bool,
) -> None:
    """Writes or adds each expert's gradient to main_grad [E, out, in]; zeros for experts without rows if `overwrite`.

    grad_of and x_of return an expert's output gradients [rows, out] and inputs [rows, in]. One product per expert: it adds
    in fp32, which torch's grouped product does not, and writes all elements for any number of rows.
    """
    for expert, (size, of_expert) in enumerate(zip(sizes, main_grad, strict=True)):
        if size:
            kernel(of_expert, grad_of(expert), x_of(expert), overwrite)
        elif overwrite:
            of_expert.zero_()


def choose(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> tuple[GroupedGemm, str | None]:
    """Returns the kernel, and the reason why it is not torch's grouped product (None if it is).

    widths: of rows and of inner channels, as this rank has them.
    """
    name = str(dtype).removeprefix("torch.")
    if device.type != "cuda":
        return Loop(), f"torch's grouped product is not faster on {device.type}"
    if dtype != torch.bfloat16:
        return Loop(), f"torch's grouped product is for bfloat16, not {name}"
    elements = _ALIGNMENT // dtype.itemsize
    odd = [width for width in widths if width % elements]
    if odd:
        return Loop(), f"torch's grouped product needs widths that are multiples of {elements}, not {odd[0]}"
    failure = failure_of_grouped(device, dtype)
    return (Grouped(), None) if failure is None else (Loop(), failure)


def failure_of_grouped(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why `Grouped` cannot run here, or None if it can: it is tried on small matrices."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped product"
    size = 2 * _ALIGNMENT
    rows = torch.ones(2, size, dtype=dtype, device=device)
    matrices = torch.ones(3, size, size, dtype=dtype, device=device)
    assignments = Assignments(torch.tensor([0, 1, 1], device=device), [2, 0, 1])
    try:
        product = Grouped().gather_product(rows, assignments, matrices)
        total = Grouped().product_sum(product, assignments, matrices.transpose(1, 2), 2)
    except RuntimeError as error:
        return f"torch {torch.__version__} cannot run its grouped product here: {first_line(error)}"
    if total[0].ne(size**2).any() or total[1].ne(2 * size**2).any():
        return f"torch {torch.__version__} computes its grouped product wrongly here"
    return None


def _grouped(values: Tensor, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """values [A, in] -> [A, out]."""
    if not len(values):
        return values.new_empty(0, matrices.shape[-1])
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    return F.grouped_mm(values, matrices, offs=ends.to(values.device, non_blocking=True))


def _product_dtype(operand: Tensor) -> torch.dtype:
    return torch.float32 if slow_half(operand.device, operand.dtype) else operand.dtype
