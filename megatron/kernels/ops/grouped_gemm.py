"""Products of rows with the matrices of their experts.

A assignments of a row to an expert, sorted by expert; E experts of this rank. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.base.errors import first_line
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.gemm import slow_half

_ALIGNMENT = 16  # bytes; of the distance between rows of a matrix, for torch's grouped product

# (values [A, in], matrices [E, in, out] with any strides, their assignments) -> [A, out], in the same dtype
GroupedGemm = Callable[[Tensor, Tensor, Assignments], Tensor]


def loop(values: Tensor, matrices: Tensor, assignments: Assignments) -> Tensor:
    """The reference: one product per expert that has rows.

    Half-precision products run in fp32 where that is faster (gemm.py).
    """
    out = values.new_empty(values.shape[0], matrices.shape[-1])
    wide = slow_half(values.device, values.dtype)
    sizes = list(assignments.sizes)
    pieces = zip(sizes, values.split(sizes), matrices.unbind(), out.split(sizes), strict=True)
    for size, value, matrix, result in pieces:
        if size and wide:
            result.copy_(value.float() @ matrix.float())
        elif size:
            torch.mm(value, matrix, out=result)
    return out


def grouped(values: Tensor, matrices: Tensor, assignments: Assignments) -> Tensor:
    """One call of torch for all experts: one kernel on CUDA, and on a CPU the loop, outside Python."""
    if not values.shape[0]:
        return values.new_empty(0, matrices.shape[-1])
    return F.grouped_mm(values, matrices, offs=assignments.ends)


def choose(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> tuple[GroupedGemm, str | None]:
    """Returns the kernel, and the reason why it is not torch's grouped product (None if it is).

    widths: the sizes of rows and of inner channels on this rank.
    """
    name = str(dtype).removeprefix("torch.")
    if slow_half(device, dtype):
        return loop, f"this CPU multiplies {name} in fp32"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return loop, f"torch's grouped product is for bfloat16, not {name}"
    elements = _ALIGNMENT // dtype.itemsize
    odd = [width for width in widths if width % elements]
    if odd:
        return loop, f"torch's grouped product needs widths that are multiples of {elements}, not {odd[0]}"
    failure = failure_of_grouped(device, dtype)
    return (grouped, None) if failure is None else (loop, failure)


def failure_of_grouped(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why `grouped` cannot run here, or None if it can: it is tried on small matrices."""
    size = 2 * _ALIGNMENT
    values = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, device=device).unsqueeze(1).expand(3, size).contiguous()
    matrices = torch.ones(3, size, size, dtype=dtype, device=device)
    ends = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    assignments = Assignments(torch.tensor([0, 1, 1], device=device), ends, [2, 0, 1])
    try:
        products = [grouped(values, stack, assignments) for stack in (matrices, matrices.transpose(1, 2))]
    except RuntimeError as error:
        return f"torch {torch.__version__} cannot run its grouped product here: {first_line(error)}"
    if any(product.ne(values * size).any() for product in products):
        return f"torch {torch.__version__} computes its grouped product wrongly here"
    return None
