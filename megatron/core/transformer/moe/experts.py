"""The experts of a rank, on the rows that were sent to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parameter import Parameter
from megatron.core.transformer.context import Build
from megatron.kernels.ops import grouped_mlp
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.grouped_linear import GroupedLinear, PlainGrouped
from megatron.kernels.ops.grouped_mlp import Deliver, ExpertKernels, SavedExperts
from megatron.kernels.ops.weighted_activation import Separate
from megatron.spec.moe import ExpertsSpec


class Experts(nn.Module):
    """rows [M, h], weights [A] fp32 -> [M, h]: for each row the sum of its experts' outputs, with the assignments' weights.

    No communication. With etp > 1 the outputs are parts of a sum over etp. Every expert gets a gradient: zero if it has no
    rows.
    """

    def __init__(self, build: Build, spec: ExpertsSpec, *, recompute_activation: bool = False) -> None:
        """recompute_activation: backward computes the activation again (GEMM-last)."""
        super().__init__()
        of_experts = build.kernels.experts
        plain = PlainGrouped(build.kernels.grouped, of_experts.rows.gather)
        self.linear_fc1 = ExpertMatrices(build.parameter(spec.linear_fc1), plain)
        self.linear_fc2 = ExpertMatrices(build.parameter(spec.linear_fc2), plain)
        activation = of_experts.activations.get(spec.activation)
        if activation is None:
            activation = Separate(build.kernels.fused.activations[spec.activation])
        self._kernels = of_experts.weight_grad, activation, of_experts.rows
        self._keep_activation, self._skip_fc2 = not recompute_activation, False

    def forward(self, rows: Tensor, weights: Tensor, assignments: Assignments) -> Tensor:
        """See the class."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        call = _Call(ExpertKernels(fc1.kernel, fc2.kernel, *self._kernels), self._keep_activation, self._skip_fc2)
        out: Tensor = _Experts.apply(rows, weights, fc1.weight, fc2.weight, assignments, call)
        return out

    @contextmanager
    def without_gemm(self) -> Iterator[None]:
        """In the body a call leaves out the down projections; the result has its shape and undefined values.

        As RowParallelLinear.without_gemm.
        """
        self._skip_fc2 = True
        try:
            yield
        finally:
            self._skip_fc2 = False


class ExpertMatrices(nn.Module):
    """The weights of one product of all experts, and its kernel, which may be replaced between steps."""

    def __init__(self, weight: Parameter, kernel: GroupedLinear) -> None:
        super().__init__()
        self.weight, self.kernel = weight, kernel


@dataclass(frozen=True)
class _Call:
    kernels: ExpertKernels
    keep_activation: bool
    skip_fc2: bool


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        fc1: Parameter,
        fc2: Parameter,
        assignments: Assignments,
        call: _Call,
    ) -> Tensor:
        out, saved = grouped_mlp.forward(
            rows,
            weights,
            assignments,
            fc1,
            fc2,
            call.kernels,
            keep_activation=call.keep_activation,
            skip_fc2=call.skip_fc2,
        )
        ctx.save_for_backward(*(saved if fc1.requires_grad else saved._replace(rows=None)))
        # Parameters live as long as the model, and the routing as long as its layer's backward: kept as they are.
        ctx.fc1, ctx.fc2, ctx.assignments, ctx.kernels = fc1, fc2, assignments, call.kernels
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fc1, fc2 = _Delivery(ctx.fc1), _Delivery(ctx.fc2)
        grad_rows, grad_weights = grouped_mlp.backward(
            grad,
            SavedExperts(*ctx.saved_tensors),
            ctx.assignments,
            ctx.fc1,
            ctx.fc2,
            ctx.kernels,
            deliver_fc1=fc1.deliver,
            deliver_fc2=fc2.deliver,
            wants_rows=ctx.needs_input_grad[0],
        )
        return grad_rows, grad_weights, fc1.grad, fc2.grad, None, None


class _Delivery:
    """A parameter's gradient on its way to its slot, or to autograd (`grad`) when no buffer owns it."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter
        self.grad: Tensor | None = None

    @property
    def deliver(self) -> Deliver | None:
        if not self._parameter.requires_grad:
            return None
        return self._return if self._parameter.slot is None else self._parameter.slot.write

    def _return(self, write: Callable[[Tensor, bool], None]) -> None:
        parameter = self._parameter
        wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        write(wide, True)
        self.grad = wide.to(parameter.dtype)
