"""Normalization layer over the hidden dim, over a head, or over all heads together."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.regions import Reduce
from megatron.core.groups import Group, Groups
from megatron.core.parameter import make_parameter
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear
from megatron.core.transformer.residual import Residual, total
from megatron.kernels.ops.norm import NormKernel, add_norm, layer_norm, own, rms_norm, separate
from megatron.spec.norm import LAYER_NORM, NormSpec


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the dims that the weight has.

    Communication: where the weight is sharded over tp, an all-reduce of one fp32 number per row in forward, and in
    backward. Else none.
    """

    def __init__(
        self,
        spec: NormSpec,
        groups: Groups,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernel: NormKernel = separate,
        reduce: Reduce = all_reduce,
    ) -> None:
        """reduce: adds up the statistics of norms whose weight is sharded."""
        super().__init__()
        parameters = {
            name: make_parameter(parameter, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device)
            for name, parameter in spec.parameters()
        }
        # In the place of a parameter that is not trained stands a constant, so that every kernel computes the norm.
        self.weight: Tensor = (
            parameters["weight"] if spec.has_weight else torch.ones(spec.size, dtype=dtype, device=device)
        )
        self.bias: Tensor | None = None  # RMSNorm has none, and kernels tell the kinds by it
        if spec.kind == LAYER_NORM:
            self.bias = parameters["bias"] if spec.has_bias else torch.zeros(spec.size, dtype=dtype, device=device)
        self.epsilon, self._zero_centered = spec.epsilon, spec.zero_centered
        self._average = (
            own if spec.heads is None or groups.tp.size == 1 else functools.partial(_average_over, groups.tp, reduce)
        )
        self._deferred, self.kernel = False, kernel

    def forward(self, x: Tensor | Residual) -> Tensor:
        """Same shape; the weight's dtype. A norm that a linear layer applies itself returns x unchanged.

        A pending addition of a residual stream is part of the same kernel, where there is one for both.
        """
        if self._deferred:
            return total(x)
        if isinstance(x, Residual) and x.is_pending and self.kernel.residual is not None:
            return x.added_by(self._add_norm)
        return self.normalize(total(x))

    def defer_to(self, *linears: ColumnParallelLinear | ReplicatedLinear) -> None:
        """From now on the layers behind the norm apply it, and again in their backward (GEMM-last)."""
        self._deferred = True
        for linear in linears:
            linear.prologue = NormPrologue(self)

    def _add_norm(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, branch, self.factor(), self.bias, self.epsilon, self.kernel)

    def normalize(self, x: Tensor) -> Tensor:
        """The norm itself."""
        if self.bias is None:
            return rms_norm(x, self.factor(), self.epsilon, self._average, self.kernel)
        return layer_norm(x, self.factor(), self.bias, self.epsilon, self.kernel)

    def factor(self) -> Tensor:
        """The weight that x is multiplied by."""
        return self.weight + 1.0 if self._zero_centered else self.weight


class NoNorm(nn.Module):
    """Stands at the place of a norm that a model does not have. Same shape, in the dtype of the layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, x: Tensor | Residual) -> Tensor:
        """Returns the residual stream, or the output of attention or MLP, as it is."""
        return total(x).to(self._dtype)


def _average_over(group: Group, reduce: Reduce, numbers: Tensor) -> Tensor:
    return reduce(numbers, group).div_(group.size)


class NormPrologue:
    """A norm as a Prologue of core/tensor_parallel/gemm_last.py."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """See Prologue."""
        return self._norm.normalize(x)

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue. LayerNorm works in the weight's dtype."""
        weight, bias = self._norm.factor(), self._norm.bias
        return (x, weight) if bias is None else (x.to(weight.dtype), weight, bias)

    def compute(self, *operands: Tensor) -> tuple[Tensor, Any]:
        """See Prologue."""
        (x, weight, *bias), kernel = operands, self._norm.kernel
        if not bias:
            return kernel.compute_rms_norm(x, weight, self._norm.epsilon, own)
        return kernel.compute_layer_norm(x, weight, bias[0], self._norm.epsilon)

    def gradient(self, grad: Tensor, statistics: Any, *operands: Tensor) -> tuple[Tensor | None, ...]:
        """See Prologue."""
        (x, weight, *bias), kernel = operands, self._norm.kernel
        if not bias:
            return kernel.gradient_rms_norm(grad, x, weight, statistics, own)
        return kernel.gradient_layer_norm(grad, x, weight, bias[0], statistics)
