"""The experts of a rank, on the rows that were sent to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parameter import Parameter, deliver
from megatron.core.streams.turns import Switch
from megatron.core.transformer.context import Build
from megatron.kernels.ops import grouped_mlp
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.grouped_linear import GroupedLinear, PlainGrouped
from megatron.kernels.ops.grouped_mlp import Deliver, DeliverBias, ExpertBiases, ExpertKernels, SavedExperts
from megatron.kernels.ops.weighted_activation import Separate
from megatron.spec.moe import ExpertsSpec


class Experts(nn.Module):
    """rows [M, h], weights [A] fp32 -> [M, h]: for each row the sum of its experts' outputs,
    with the assignments' weights.

    No communication. With etp > 1 the outputs are parts of a sum over etp. Every expert gets a gradient: zero if it has
    no rows.
    """

    def __init__(self, build: Build, spec: ExpertsSpec, *, recompute_activation: bool = False) -> None:
        """recompute_activation: backward computes the activation again (GEMM-last)."""
        super().__init__()
        of_experts = build.kernels.experts
        plain = PlainGrouped(build.kernels.grouped, of_experts.rows.gather)
        biases = [None if bias is None else build.parameter(bias) for bias in (spec.fc1_bias, spec.fc2_bias)]
        self.linear_fc1 = ExpertMatrices(build.parameter(spec.linear_fc1), biases[0], plain)
        self.linear_fc2 = ExpertMatrices(build.parameter(spec.linear_fc2), biases[1], plain)
        self._etp_rank = build.groups.etp.rank
        activation = of_experts.activations.get(spec.activation)
        if activation is None:
            activation = Separate(build.kernels.fused.activations[spec.activation])
        self._kernels = of_experts.weight_grad, activation, of_experts.rows
        self._keep_activation, self._skip_fc2 = not recompute_activation, Switch()

    def forward(self, rows: Tensor, weights: Tensor, assignments: Assignments) -> Tensor:
        """See the class."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        kernels = ExpertKernels(fc1.kernel, fc2.kernel, *self._kernels)
        call = _Call(kernels, assignments, self._keep_activation, bool(self._skip_fc2), self._etp_rank)
        out: Tensor = _Experts.apply(rows, weights, fc1.weight, fc2.weight, fc1.bias, fc2.bias, call)
        return out

    def without_gemm(self) -> AbstractContextManager[None]:
        """In the body a call leaves out the down projections; the result has its shape and undefined values.

        As RowParallelLinear.without_gemm.
        """
        return self._skip_fc2.on()


class ExpertMatrices(nn.Module):
    """The weights and biases of one product of all experts, and its kernel, which may be replaced between steps."""

    def __init__(self, weight: Parameter, bias: Parameter | None, kernel: GroupedLinear) -> None:
        super().__init__()
        self.weight, self.bias, self.kernel = weight, bias, kernel


@dataclass(frozen=True)
class _Call:
    kernels: ExpertKernels
    assignments: Assignments
    keep_activation: bool
    skip_fc2: bool
    etp_rank: int

    def biases(self, fc1: Tensor | None, fc2: Tensor | None) -> ExpertBiases | None:
        if fc1 is None or fc2 is None:
            return None
        return ExpertBiases(fc1, fc2, self.etp_rank * fc2.shape[1])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        fc1: Parameter,
        fc2: Parameter,
        bias1: Parameter | None,
        bias2: Parameter | None,
        call: _Call,
    ) -> Tensor:
        out, saved = grouped_mlp.forward(
            rows,
            weights,
            call.assignments,
            fc1,
            fc2,
            call.kernels,
            biases=call.biases(bias1, bias2),
            keep_activation=call.keep_activation,
            skip_fc2=call.skip_fc2,
        )
        ctx.save_for_backward(*(saved if fc1.requires_grad else saved._replace(rows=None)))
        # Parameters live as long as the model, and the routing as long as its layer's backward: kept as they are.
        ctx.parameters, ctx.call = (fc1, fc2, bias1, bias2), call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        fc1, fc2, bias1, bias2 = ctx.parameters
        deliveries = [_Delivery(parameter) for parameter in ctx.parameters]
        grad_rows, grad_weights = grouped_mlp.backward(
            grad,
            SavedExperts(*ctx.saved_tensors),
            call.assignments,
            fc1,
            fc2,
            call.kernels,
            biases=call.biases(bias1, bias2),
            deliver_fc1=deliveries[0].deliver,
            deliver_fc2=deliveries[1].deliver,
            deliver_biases=(deliveries[2].deliver_bias, deliveries[3].deliver_bias),
            wants_rows=ctx.needs_input_grad[0],
        )
        return grad_rows, grad_weights, *(delivery.grad for delivery in deliveries), None


class _Delivery:
    """A parameter's gradient on its way to its slot, or to autograd (`grad`) when no buffer owns it."""

    def __init__(self, parameter: Parameter | None) -> None:
        self._parameter = parameter
        self.grad: Tensor | None = None

    @property
    def deliver(self) -> Deliver | None:
        if self._parameter is None or not self._parameter.requires_grad:
            return None
        return self._return if self._parameter.slot is None else self._parameter.slot.write

    @property
    def deliver_bias(self) -> DeliverBias | None:
        return self._take if self._parameter is not None and self._parameter.requires_grad else None

    def _take(self, grad: Tensor) -> None:
        parameter = self._parameter
        assert parameter is not None
        self.grad = deliver(parameter, grad)

    def _return(self, write: Callable[[Tensor, bool], None]) -> None:
        parameter = self._parameter
        assert parameter is not None
        wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        write(wide, True)
        self.grad = wide.to(parameter.dtype)
