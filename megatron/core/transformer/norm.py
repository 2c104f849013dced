"""Normalization layer over the hidden or head dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.groups import Group
from megatron.core.parameter import Init, make_parameter
from megatron.kernels.ops.norm import layer_norm, rms_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the last dim, as configured. Weights are replicated over tp; no communication."""

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
        self._config = config

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the weight's dtype."""
        weight = self.weight + 1.0 if self._config.apply_layernorm_1p else self.weight
        if self._config.normalization == "RMSNorm":
            return rms_norm(x, weight, self._config.norm_epsilon)
        return layer_norm(x, weight, self.bias, self._config.norm_epsilon)
