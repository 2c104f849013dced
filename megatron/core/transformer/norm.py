"""Normalization layer over the hidden or head dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.groups import Group
from megatron.core.parameter import Init, make_parameter
from megatron.kernels.ops.norm import (
    compute_layer_norm,
    compute_rms_norm,
    gradient_layer_norm,
    gradient_rms_norm,
    layer_norm,
    rms_norm,
)


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the last dim, as configured. Weights are replicated over tp; no communication.

    Also a Prologue of core/tensor_parallel/gemm_last.py: a linear layer can compute it again in its backward.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        *,
        tp: Group,
        sum_over_tp: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`sum_over_tp`: the input is sharded over tp (sequence or heads), so each rank sees part of the gradient."""
        super().__init__()
        one = 0.0 if config.apply_layernorm_1p else 1.0

        def parameter(value: float) -> nn.Parameter:
            init = Init("constant", value)
            return make_parameter(
                (size,), init, dtype=dtype, device=device, tp=tp, decay=False, sum_over_tp=sum_over_tp
            )

        self.weight = parameter(one)
        self.bias = parameter(0.0) if config.normalization == "LayerNorm" else None
        self._epsilon, self._one_less = config.norm_epsilon, config.apply_layernorm_1p

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the weight's dtype."""
        if self.bias is None:
            return rms_norm(x, self._weight(), self._epsilon)
        return layer_norm(x, self._weight(), self.bias, self._epsilon)

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue. LayerNorm works in the weight's dtype."""
        weight = self._weight()
        return (x, weight) if self.bias is None else (x.to(weight.dtype), weight, self.bias)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Any]:
        """See Prologue."""
        if bias is None:
            return compute_rms_norm(x, weight, self._epsilon)
        return compute_layer_norm(x, weight, bias, self._epsilon)

    def gradient(
        self, grad: Tensor, rest: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """See Prologue."""
        if bias is None:
            return gradient_rms_norm(grad, x, weight, rest)
        return gradient_layer_norm(grad, x, weight, bias, rest)

    def _weight(self) -> Tensor:
        return self.weight + 1.0 if self._one_less else self.weight
