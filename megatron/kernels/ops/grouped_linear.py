"""The products of one linear layer of all experts of a rank, but for the gradient of its weight
(expert_weight_grad.py).

A assignments of a row to an expert, sorted by expert; E experts with matrices [out, in]. Operands with rows that are
picked may be read where they lie. Nothing here is differentiable.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Gather, Picked
from megatron.kernels.ops.grouped_gemm import GroupedGemm


class GroupedLinear(Protocol):
    """Products of rows with the matrices of their experts, in the dtype of the rows."""

    def output(self, values: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """values [A, in], weight [E, out, in] -> [A, out]."""
        ...

    def input_grad(self, grads: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """grads [A, out] of the output, weight [E, out, in] -> [A, in]."""
        ...


class PlainGrouped:
    """See GroupedLinear."""

    def __init__(self, gemm: GroupedGemm, gather: Gather) -> None:
        self._gemm, self._gather = gemm, gather

    def output(self, values: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        return self._gemm(values.gathered(self._gather), weight.transpose(1, 2), assignments)

    def input_grad(self, grads: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        return self._gemm(grads.gathered(self._gather), weight, assignments)
