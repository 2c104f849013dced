"""Token embedding with the vocabulary sharded over tp."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.comm.regions import sum_partial, sum_partial_to_sequence_shard
from megatron.core.groups import Groups
from megatron.core.parameter import Parameter, make_parameter
from megatron.kernels.ops.embedding_grad import AddRows, add_rows
from megatron.spec.parameter import ParamSpec


class VocabParallelEmbedding(nn.Module):
    """ids [b, s] -> [s or s/tp, b, h]. Each rank looks up the ids it holds, zeros elsewhere, and the sum is taken.

    Forward: reduce-scatter along the sequence (sequence parallel) or all-reduce. Backward: all-gather, or nothing.
    """

    def __init__(
        self,
        spec: ParamSpec,
        groups: Groups,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernel: AddRows = add_rows,
    ) -> None:
        """`spec`: [rows, h], sharded by rows; tp divides their number. kernel: adds to the gradient of the weight."""
        super().__init__()
        self.weight = make_parameter(spec, groups, dtype=dtype, device=device)
        self._first = groups.tp.rank * self.weight.shape[0]
        self._tp, self._sequence_parallel, self._kernel = groups.tp, sequence_parallel, kernel

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
        first = self._first if self._tp.size > 1 else None
        partial: Tensor = _Lookup.apply(ids.t(), self.weight, first, self._kernel)
        if self._sequence_parallel:
            return sum_partial_to_sequence_shard(partial, self._tp)
        return sum_partial(partial, self._tp)


class _Lookup(torch.autograd.Function):
    """ids [s, b] -> rows of the local weight, zero for ids on other ranks; `first` is None when the weight is whole.

    Backward adds straight into the weight's slot, in fp32. An id of another rank stands for some row of this one, which
    gets nothing from it. These rows differ, because equal ones are added one after the other.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, first: int | None, kernel: AddRows) -> Tensor:
        ctx.weight, ctx.kernel = weight, kernel
        if first is None:
            ctx.save_for_backward(ids, None)
            return F.embedding(ids, weight)
        local = ids - first
        outside = (local < 0) | (local >= weight.shape[0])
        local = local.remainder(weight.shape[0])
        ctx.save_for_backward(local, outside)
        return F.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        local, outside = ctx.saved_tensors
        weight: Parameter = ctx.weight
        if outside is not None:
            grad = grad.masked_fill(outside.unsqueeze(-1), 0.0)
        if weight.slot is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, local, weight.shape[0], -1, False), None, None
        kernel: AddRows = ctx.kernel

        def add(main_grad: Tensor, overwrite: bool) -> None:
            if overwrite:
                main_grad.zero_()
            kernel(main_grad, local.flatten(), grad.flatten(0, -2))

        weight.slot.write_now(add)
        return None, None, None, None
