"""Linear layers sharded over tp: column (outputs sharded) and row (inputs sharded).

Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198. Shapes: s sequence, b batch,
in/out features of the global layer. With sequence parallelism the leading dim outside the pair is s/tp, else s.

Weights may have more than two dims (QKV per KV group, gate/up pairs) so that their global form is a plain concatenation
along one dim for any tp; the GEMM sees them flattened to [out/tp, in].

A frozen weight (requires_grad False) keeps no input for its gradient. `lora`, where it is set, is a module of the same
input and output whose output is added (core/transformer/lora.py). `first`, where it is given, is a norm or an activation
before the layer: then x is its input, of its dtype and width, and its result is not kept (gemm_last.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import Handle, all_gather
from megatron.core.groups import Group
from megatron.core.parameter import GradSlot, Init, Parameter, make_parameter
from megatron.core.tensor_parallel.gemm_last import Kept, Prologue
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
        divided: int | None = None,
    ) -> None:
        """`out_shape` is the global output shape; its dim `shard_dim` is sharded, with `divided` as `parameter.cut` says.
        `weight`: share this one (tied head)."""
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device, "tp": tp, "tp_dim": shard_dim, "divided": divided}
        self.weight = make_parameter((*out_shape, in_features), init, **place) if weight is None else weight
        self.bias = make_parameter(out_shape, Init("constant", 0.0), decay=False, **place) if bias else None
        self.lora: nn.Module | None = None
        self._tp, self._sequence_parallel, self._weight_grad = tp, sequence_parallel, weight_grad
        self._overlap = overlap

    def forward(self, x: Tensor, first: Prologue | None = None) -> Tensor:
        """See the class, and the file for `first`."""
        if self.lora is None:
            return self._base(x, first)
        if first is None:
            return self._base(x, None) + self.lora(x)
        normed = first(x)  # the adapters' product is the one that needs it again
        return self._base(normed, None) + self.lora(normed, (first, x))

    def _base(self, x: Tensor, first: Prologue | None) -> Tensor:
        tp, sequence_parallel, operands = self._tp, self._sequence_parallel, _operands(x, first)
        out: Tensor = _Column.apply(
            self.weight, self.bias, tp, sequence_parallel, self._weight_grad, self._overlap, first, True, *operands
        )
        return out


class RowParallelLinear(nn.Module):
    """[s, b, in/tp] -> [s or s/tp, b, out]. Forward: reduce-scatter (sequence parallel) or all-reduce.

    Backward: all-gather (sequence parallel) or nothing. The bias is replicated and added once, after the sum.

    `product` False: neither product nor communication; the result has its shape, and any values. For the second run of a
    recomputed region that ends here: it wants what is saved on the way.
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

    def forward(self, x: Tensor, first: Prologue | None = None, *, product: bool = True) -> Tensor:
        """See the class, and the file for `first`."""
        if self.lora is None:
            return self._base(x, first, product)
        if first is None:
            return self._base(x, None, product) + self.lora(x)
        inner = first(x)
        return self._base(inner, None, product) + self.lora(inner, (first, x))

    def _base(self, x: Tensor, first: Prologue | None, product: bool) -> Tensor:
        tp, operands = self._tp, _operands(x, first)
        if tp.size == 1:
            # Nothing to sum: the bias goes into the GEMM and is rounded with it, as in any linear layer.
            whole: Tensor = _Column.apply(
                self.weight, self.bias, tp, False, self._weight_grad, self._overlap, first, product, *operands
            )
            return whole
        out: Tensor = _Row.apply(
            self.weight, tp, self._sequence_parallel, self._weight_grad, self._overlap, first, product, *operands
        )
        return out if self.bias is None else out + self.bias


def _operands(x: Tensor, first: Prologue | None) -> tuple[Tensor, ...]:
    return (x,) if first is None else first.operands(x)


_COLUMN, _ROW = 8, 7  # arguments of the functions below before the operands


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Parameter,
        bias: Parameter | None,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        overlap: Plain,
        first: Prologue | None,
        product: bool,
        *operands: Tensor,
    ) -> Tensor:
        _save(ctx, weight, first, operands)
        # Parameters live as long as the model: kept as they are, with the slot their gradient goes to.
        ctx.weight, ctx.bias, ctx.tp, ctx.weight_grad, ctx.overlap = weight, bias, tp, weight_grad, overlap
        ctx.sequence_parallel = sequence_parallel and tp.size > 1
        if not product:
            return _any_values(weight, operands[0], shards=1)
        x = Kept(first, operands).input()
        matrix, added = weight.flatten(0, -2), None if bias is None else bias.flatten()
        if ctx.sequence_parallel:
            return overlap.gather_linear(x, matrix, added, tp)
        return linear(x, matrix, added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tp: Group = ctx.tp
        overlap: Plain = ctx.overlap
        kept, x = _kept(ctx, wanted=ctx.needs_input_grad[0])
        gathering: list[Handle] = []
        if x is not None and ctx.sequence_parallel:
            x, gathering = overlap.gather_input(x, tp)
        grad_x, reducing = None, list[Handle]()
        if any(ctx.needs_input_grad[_COLUMN:]):
            matrix = ctx.weight.flatten(0, -2)
            if tp.size > 1:
                grad_x, reducing = overlap.input_grad_sum(grad, matrix, tp, scatter=ctx.sequence_parallel)
            else:
                grad_x = input_grad(grad, matrix)
        wait(gathering)
        grad_weight = None if x is None else _deliver_weight(ctx.weight, grad, x, ctx.weight_grad)
        grad_bias = _deliver(ctx.bias, grad.flatten(0, -2).sum(0)) if ctx.needs_input_grad[1] else None
        wait(reducing)
        return grad_weight, grad_bias, *(None for _ in range(_COLUMN - 2)), *kept.gradients(grad_x)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Parameter,
        tp: Group,
        sequence_parallel: bool,
        weight_grad: WeightGrad,
        overlap: Plain,
        first: Prologue | None,
        product: bool,
        *operands: Tensor,
    ) -> Tensor:
        _save(ctx, weight, first, operands)
        ctx.weight, ctx.tp, ctx.weight_grad, ctx.overlap = weight, tp, weight_grad, overlap
        ctx.sequence_parallel = sequence_parallel and tp.size > 1
        if not product:
            return _any_values(weight, operands[0], shards=tp.size if ctx.sequence_parallel else 1)
        return overlap.linear_sum(Kept(first, operands).input(), weight, tp, scatter=ctx.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, wants_input = None, any(ctx.needs_input_grad[_ROW:])
        if ctx.sequence_parallel and wants_input:
            grad, grad_x = ctx.overlap.gather_input_grad(grad, ctx.weight, ctx.tp)
        elif ctx.sequence_parallel:
            grad = all_gather(grad, ctx.tp)
        elif wants_input:
            grad_x = input_grad(grad, ctx.weight)
        kept, x = _kept(ctx, wanted=ctx.needs_input_grad[0])
        grad_weight = None if x is None else _deliver_weight(ctx.weight, grad, x, ctx.weight_grad)
        return grad_weight, *(None for _ in range(_ROW - 1)), *kept.gradients(grad_x)


def _any_values(weight: Tensor, x: Tensor, *, shards: int) -> Tensor:
    return weight.new_empty(x.shape[0] // shards, *x.shape[1:-1], weight.shape[0])


def _save(ctx: Any, weight: Parameter, first: Prologue | None, operands: tuple[Tensor, ...]) -> None:
    """What backward needs of the input: nothing, where neither a weight's gradient nor a prologue does."""
    ctx.first = first
    ctx.save_for_backward(*(operands if weight.requires_grad or first is not None else [None]))


def _kept(ctx: Any, *, wanted: bool) -> tuple[Kept, Tensor | None]:
    """What was kept, and the product's input if it is `wanted`: for the weight's gradient."""
    kept = Kept(ctx.first, ctx.saved_tensors)
    if ctx.first is None:
        return kept, kept.input() if wanted else None
    x = kept.input()  # the prologue's own gradient needs its statistics, too
    return kept, x if wanted else None


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
