"""The experts that every token passes: one MLP of their joint width, which gives the same result as their sum."""

from __future__ import annotations

from torch import Tensor

from megatron.core.transformer.context import Build
from megatron.core.transformer.mlp import MLP
from megatron.spec.mlp import MLPSpec
from megatron.spec.moe import GateSpec


class SharedExperts(MLP):
    """[s or s/tp, b, h] -> the same; times sigmoid(x gate_weight^T), a number per token, where there is a gate."""

    def __init__(self, build: Build, spec: MLPSpec, gate: GateSpec | None) -> None:
        super().__init__(build, spec)
        self._product, self._sigmoid = build.kernels.product, build.kernels.sigmoid
        self.gate_weight = None if gate is None else build.parameter(dict(gate.parameters())["gate_weight"])

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out = super().forward(x)
        return out if self.gate_weight is None else self._sigmoid(self._product(x, self.gate_weight)) * out
