"""Linear layers sharded over tp: column (outputs sharded) and row (inputs sharded); and replicated ones.

Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198. Shapes: s sequence, b
batch, in/out features of the global layer. With sequence parallelism the leading dim outside the pair is s/tp, else s.

Weights may have more than two dims (QKV per KV group, gate/up pairs) so that their global form is a plain concatenation
along one dim for any tp; the GEMM sees them flattened to [out/tp, in].

A frozen weight (requires_grad False) keeps no input for its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import Handle, all_gather
from megatron.core.groups import Group, Groups
from megatron.core.parameter import GradSlot, Parameter, deliver, make_parameter
from megatron.core.streams.turns import Switch
from megatron.core.tensor_parallel.gemm_last import Kept, Prologue
from megatron.core.tensor_parallel.overlap import PLAIN, Plain, wait
from megatron.kernels.ops.linear import LinearKernel, OutputGrad, new_weight_grad
from megatron.spec.linear import LinearSpec
from megatron.spec.parameter import ParamSpec


@dataclass(frozen=True)
class LinearContext:
    """Where and how linear layers run: all but the layer's own description."""

    groups: Groups
    sequence_parallel: bool  # in effect: tp is larger than 1
    kernel: LinearKernel  # of every layer that is given no other
    dtype: torch.dtype
    device: torch.device
    overlap: Plain = PLAIN

    @property
    def tp(self) -> Group:
        """The ranks that share the layers."""
        return self.groups.tp


class _ParallelLinear(nn.Module, ABC):
    """The parameters that both kinds have, and their adapters.

    lora: a module of the same input and output whose output is added (core/transformer/lora.py). prologue: a norm or an
    activation that this layer applies to its input first, and computes again in its backward instead of keeping the
    result (gemm_last.py). kernel: the layer's products; an FP8 layer gets one of its own after it is built.
    """

    def __init__(self, spec: LinearSpec, context: LinearContext, weight: Parameter | None = None) -> None:
        super().__init__()

        def parameter(described: ParamSpec) -> Parameter:
            return make_parameter(
                described,
                context.groups,
                sequence_parallel=context.sequence_parallel,
                dtype=context.dtype,
                device=context.device,
            )

        self.weight = parameter(spec.weight) if weight is None else weight
        self.bias = None if spec.bias is None else parameter(spec.bias)
        self.lora: nn.Module | None = None
        self.prologue: Prologue | None = None
        self.kernel = context.kernel
        self._skip_gemm = Switch()
        self._context = context

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.lora is None:
            return self._base(x, self.prologue)
        if self.prologue is None:
            return self._base(x, None) + self.lora(x)
        # The adapters' product, and not this layer's, computes the prologue again.
        result = self.prologue(x)
        return self._base(result, None) + self.lora(result, (self.prologue, x))

    def without_gemm(self) -> AbstractContextManager[None]:
        """In the body a call makes neither its product nor its communication;
        the result has its shape and undefined values.

        For the second run of a recomputed region that ends with this layer: only the tensors that are saved on the way
        are needed.
        """
        return self._skip_gemm.on()

    @abstractmethod
    def _base(self, x: Tensor, prologue: Prologue | None) -> Tensor:
        """The layer without its adapters."""


class ColumnParallelLinear(_ParallelLinear):
    """[s or s/tp, b, in] -> [s, b, out/tp]. Forward: all-gather (sequence parallel) or nothing.

    Backward: all-gather of the input and reduce-scatter of its gradient, or all-reduce of it without sequence
    parallelism. `LinearContext.overlap` says which of these is overlapped with which GEMM.
    """

    def _base(self, x: Tensor, prologue: Prologue | None) -> Tensor:
        call = _Call(self._context, self.kernel, prologue, bool(self._skip_gemm))
        out: Tensor = _Column.apply(self.weight, self.bias, call, *_operands(x, prologue))
        return out


class RowParallelLinear(_ParallelLinear):
    """[s, b, in/tp] -> [s or s/tp, b, out]. Forward: reduce-scatter (sequence parallel) or all-reduce.

    Backward: all-gather (sequence parallel) or nothing. The bias is replicated and added once, after the sum.
    """

    def _base(self, x: Tensor, prologue: Prologue | None) -> Tensor:
        call, operands = _Call(self._context, self.kernel, prologue, bool(self._skip_gemm)), _operands(x, prologue)
        if self._context.tp.size == 1:
            # Nothing to sum: the bias goes into the GEMM and is rounded with it, as in any linear layer.
            whole: Tensor = _Column.apply(self.weight, self.bias, call, *operands)
            return whole
        out: Tensor = _Row.apply(self.weight, call, *operands)
        return out if self.bias is None else out + self.bias


class ReplicatedLinear(_ParallelLinear):
    """[s or s/tp, b, in] -> [s or s/tp, b, out]. Every rank holds the weight. No communication.

    With sequence parallelism a rank has the weight's gradient of its part of the sequence; the parts are summed after
    the backward (`ParamSpec.input_sharding`).
    """

    def _base(self, x: Tensor, prologue: Prologue | None) -> Tensor:
        call = _Call(self._context, self.kernel, prologue, bool(self._skip_gemm), replicated=True)
        out: Tensor = _Column.apply(self.weight, self.bias, call, *_operands(x, prologue))
        return out


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that are no tensors. replicated: the ranks of tp do not share the layer."""

    context: LinearContext
    kernel: LinearKernel
    prologue: Prologue | None
    skip_gemm: bool
    replicated: bool = False

    @property
    def shares(self) -> int:
        """Ranks that share the layer."""
        return 1 if self.replicated else self.context.tp.size


def _operands(x: Tensor, prologue: Prologue | None) -> tuple[Tensor, ...]:
    return (x,) if prologue is None else prologue.operands(x)


class _Column(torch.autograd.Function):
    """(weight, bias, call, *operands) -> output."""

    @staticmethod
    def forward(ctx: Any, weight: Parameter, bias: Parameter | None, call: _Call, *operands: Tensor) -> Tensor:
        _save(ctx, weight, call, operands)
        # Parameters live as long as the model: kept as they are, with the slot their gradient goes to.
        ctx.weight, ctx.bias = weight, bias
        if call.skip_gemm:
            return _undefined(weight, operands[0], shards=1)
        x = Kept(call.prologue, operands).input()
        matrix, added = weight.flatten(0, -2), None if bias is None else bias.flatten()
        if call.context.sequence_parallel and call.shares > 1:
            return call.context.overlap.gather_linear(call.kernel, x, matrix, added, call.context.tp)
        return call.kernel.output(x, matrix, added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: LinearContext = ctx.call.context
        kernel: LinearKernel = ctx.call.kernel
        tp, overlap, shared = context.tp, context.overlap, ctx.call.shares > 1
        gathered = context.sequence_parallel and shared
        operands, x = _kept(ctx, wanted=ctx.needs_input_grad[0])
        gathering: list[Handle] = []
        if x is not None and gathered:
            x, gathering = overlap.gather_input(x, tp)
        grad_x, reducing, prepared = None, list[Handle](), OutputGrad(grad)
        if any(ctx.needs_input_grad[3:]):
            matrix = ctx.weight.flatten(0, -2)
            prepared = kernel.prepare(grad, for_weight=_computed_now(ctx.weight, ctx.needs_input_grad[0]))
            if shared:
                grad_x, reducing = overlap.input_grad_sum(kernel, prepared, matrix, tp, scatter=gathered)
            else:
                grad_x = kernel.input_grad(prepared, matrix)
        wait(gathering)
        grad_weight = None if x is None else _deliver_weight(ctx.weight, prepared, x, kernel)
        grad_bias = deliver(ctx.bias, grad.flatten(0, -2).sum(0)) if ctx.needs_input_grad[1] else None
        wait(reducing)
        return grad_weight, grad_bias, None, *operands.gradients(grad_x)


class _Row(torch.autograd.Function):
    """(weight, call, *operands) -> output, summed over tp. Only where tp is larger than 1."""

    @staticmethod
    def forward(ctx: Any, weight: Parameter, call: _Call, *operands: Tensor) -> Tensor:
        _save(ctx, weight, call, operands)
        ctx.weight = weight
        tp, scatter = call.context.tp, call.context.sequence_parallel
        if call.skip_gemm:
            return _undefined(weight, operands[0], shards=tp.size if scatter else 1)
        x = Kept(call.prologue, operands).input()
        return call.context.overlap.linear_sum(call.kernel, x, weight, tp, scatter=scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: LinearContext = ctx.call.context
        kernel: LinearKernel = ctx.call.kernel
        for_weight = _computed_now(ctx.weight, ctx.needs_input_grad[0])
        grad_x, wants_input, prepared = None, any(ctx.needs_input_grad[2:]), OutputGrad(grad)
        if context.sequence_parallel and wants_input:
            prepared, grad_x = context.overlap.gather_input_grad(
                kernel, grad, ctx.weight, context.tp, for_weight=for_weight
            )
        elif context.sequence_parallel:
            prepared = OutputGrad(all_gather(grad, context.tp))
        elif wants_input:
            prepared = kernel.prepare(grad, for_weight=for_weight)
            grad_x = kernel.input_grad(prepared, ctx.weight)
        operands, x = _kept(ctx, wanted=ctx.needs_input_grad[0])
        grad_weight = None if x is None else _deliver_weight(ctx.weight, prepared, x, kernel)
        return grad_weight, None, *operands.gradients(grad_x)


def _undefined(weight: Tensor, x: Tensor, *, shards: int) -> Tensor:
    return weight.new_empty(x.shape[0] // shards, *x.shape[1:-1], weight.shape[0])


def _save(ctx: Any, weight: Parameter, call: _Call, operands: tuple[Tensor, ...]) -> None:
    """Keep the input for backward, unless neither the weight's gradient nor a prologue needs it."""
    ctx.call = call
    ctx.save_for_backward(*(operands if weight.requires_grad or call.prologue is not None else [None]))


def _kept(ctx: Any, *, wanted: bool) -> tuple[Kept, Tensor | None]:
    """The saved operands, and the product's input if it is `wanted` for the weight's gradient."""
    operands = Kept(ctx.call.prologue, ctx.saved_tensors)
    if ctx.call.prologue is None:
        return operands, operands.input() if wanted else None
    x = operands.input()  # the prologue's own gradient needs its statistics, too
    return operands, x if wanted else None


def _computed_now(weight: Parameter, wanted: bool) -> bool:
    """Whether the weight's gradient is computed in this backward, and not later, or never."""
    return wanted and (weight.slot is None or weight.slot.deferred is None)


def _deliver_weight(weight: Parameter, grad: OutputGrad, x: Tensor, kernel: LinearKernel) -> Tensor | None:
    """Accumulate the weight's gradient into its slot, or return it for autograd when no buffer owns it.

    The slot may defer the GEMM: then it keeps the gradient and `x`.
    """
    slot: GradSlot | None = weight.slot
    if slot is None:
        return new_weight_grad(kernel, weight, grad, x)
    operand = grad if slot.deferred is None else grad.plain
    slot.write(lambda main_grad, overwrite: kernel.weight_grad(main_grad.flatten(0, -2), operand, x, overwrite))
    return None
