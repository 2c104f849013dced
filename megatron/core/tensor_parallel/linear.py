"""Linear layers sharded over tp: column (outputs sharded) and row (inputs sharded).

Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198. Shapes: s sequence, b batch,
in/out features of the global layer. With sequence parallelism the leading dim outside the pair is s/tp, else s.

Weights may have more than two dims (QKV per KV group, gate/up pairs) so that their global form is a plain concatenation
along one dim for any tp; the GEMM sees them flattened to [out/tp, in].

A frozen weight (requires_grad False) keeps no input for its gradient. `lora`, where it is set, is a module of the same
input and output whose output is added (core/transformer/lora.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import Handle, all_gather
from megatron.core.groups import Group
from megatron.core.parameter import GradSlot, Init, Parameter, make_parameter
from megatron.core.tensor_parallel.overlap import PLAIN, Plain, wait
from megatron.kernels.ops.gemm import input_grad, linear
from megatron.kernels.ops.weight_grad import WeightGrad


class ColumnParallelLinear(nn.Module):
    """[s or s/tp, b, in] -> [s, b, out/tp]. Forward: all-gather (sequence parallel) or nothing.

    Backward: all-gather of the input and reduce-scatter of its gradient, or all-reduce of it without sequence parallelism.
    `overlap` says what of this runs beside which GEMM.
    """

    def __init__(
        self,
        in_features: int,
        out_shape: tuple[int, ...],
        *,
        shard_dim: int,
        bias: bool,
        init: Init,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        dtype: torch.dtype,
        device: torch.device,
        weight: Parameter | None = None,
        overlap: Plain = PLAIN,
    ) -> None:
        """`out_shape` is the global output shape; its dim `shard_dim` is sharded. `weight`: share this one (tied head)."""
        super().__init__()
        if weight is None:
            weight = make_parameter(
                (*out_shape, in_features), init, dtype=dtype, device=device, tp=tp, tp_dim=shard_dim
            )
        self.weight = weight
        self.bias = (
            make_parameter(
                out_shape, Init("constant", 0.0), dtype=dtype, device=device, tp=tp, tp_dim=shard_dim, decay=False
            )
            if bias
            else None
        )
        self.lora: nn.Module | None = None
        self._tp, self._sequence_parallel, self._weight_grad = tp, sequence_parallel, weight_grad
        self._overlap = overlap

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out: Tensor = _Column.apply(
            x, self.weight, self.bias, self._tp, self._sequence_parallel, self._weight_grad, self._overlap
        )
        return out if self.lora is None else out + self.lora(x)


class RowParallelLinear(nn.Module):
    """[s, b, in/tp] -> [s or s/tp, b, out]. Forward: reduce-scatter (sequence parallel) or all-reduce.

    Backward: all-gather (sequence parallel) or nothing. The bias is replicated and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        dtype: torch.dtype,
        device: torch.device,
        overlap: Plain = PLAIN,
    ) -> None:
        super().__init__()
        self.weight = make_parameter((out_features, in_features), init, dtype=dtype, device=device, tp=tp, tp_dim=1)
        self.bias = (
            make_parameter(
                (out_features,),
                Init("constant", 0.0),
                dtype=dtype,
                device=device,
                tp=tp,
                decay=False,
                sum_over_tp=sequence_parallel,
            )
            if bias
            else None
        )
        self.lora: nn.Module | None = None
        self._tp, self._sequence_parallel, self._weight_grad = tp, sequence_parallel, weight_grad
        self._overlap = overlap

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out = self._base(x)
        return out if self.lora is None else out + self.lora(x)

    def _base(self, x: Tensor) -> Tensor:
        if self._tp.size == 1:
            # Nothing to sum: the bias goes into the GEMM and is rounded with it, as in any linear layer.
            whole: Tensor = _Column.apply(x, self.weight, self.bias, self._tp, False, self._weight_grad, self._overlap)
            return whole
        out: Tensor = _Row.apply(x, self.weight, self._tp, self._sequence_parallel, self._weight_grad, self._overlap)
        return out if self.bias is None else out + self.bias


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        overlap: Plain,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        # Parameters live as long as the model: kept as they are, with the slot their gradient goes to.
        ctx.weight, ctx.bias, ctx.tp, ctx.weight_grad, ctx.overlap = weight, bias, tp, weight_grad, overlap
        ctx.sequence_parallel = sequence_parallel and tp.size > 1
        matrix, added = weight.flatten(0, -2), None if bias is None else bias.flatten()
        if ctx.sequence_parallel:
            return overlap.gather_linear(x, matrix, added, tp)
        return linear(x, matrix, added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        tp: Group = ctx.tp
        overlap: Plain = ctx.overlap
        gathering: list[Handle] = []
        if ctx.sequence_parallel and ctx.needs_input_grad[1]:
            x, gathering = overlap.gather_input(x, tp)
        grad_x, reducing = None, list[Handle]()
        if ctx.needs_input_grad[0]:
            matrix = ctx.weight.flatten(0, -2)
            if tp.size > 1:
                grad_x, reducing = overlap.input_grad_sum(grad, matrix, tp, scatter=ctx.sequence_parallel)
            else:
                grad_x = input_grad(grad, matrix)
        wait(gathering)
        grad_weight = _deliver_weight(ctx.weight, grad, x, ctx.weight_grad) if ctx.needs_input_grad[1] else None
        grad_bias = _deliver(ctx.bias, grad.flatten(0, -2).sum(0)) if ctx.needs_input_grad[2] else None
        wait(reducing)
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        overlap: Plain,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.tp, ctx.weight_grad, ctx.overlap = weight, tp, weight_grad, overlap
        ctx.sequence_parallel = sequence_parallel and tp.size > 1
        return overlap.linear_sum(x, weight, tp, scatter=ctx.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        grad_x = None
        if ctx.sequence_parallel and ctx.needs_input_grad[0]:
            grad, grad_x = ctx.overlap.gather_input_grad(grad, ctx.weight, ctx.tp)
        elif ctx.sequence_parallel:
            grad = all_gather(grad, ctx.tp)
        elif ctx.needs_input_grad[0]:
            grad_x = input_grad(grad, ctx.weight)
        grad_weight = _deliver_weight(ctx.weight, grad, x, ctx.weight_grad) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None, None


def _deliver_weight(weight: Parameter, grad: Tensor, x: Tensor, kernel: WeightGrad) -> Tensor | None:
    """Accumulate the weight's gradient into its slot, or return it for autograd when no buffer owns it.

    The slot may put the product off: then it keeps `grad` and `x`.
    """
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    slot: GradSlot | None = weight.slot
    if slot is None:
        return (grad.t() @ x).view(weight.shape)
    slot.write(lambda main_grad, overwrite: kernel(main_grad.flatten(0, -2), grad, x, overwrite))
    return None


def _deliver(parameter: Parameter, grad: Tensor) -> Tensor | None:
    grad = grad.view(parameter.shape)
    if parameter.slot is None:
        return grad
    parameter.slot.add(grad)
    return None
