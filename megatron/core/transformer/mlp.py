"""Feed-forward layer. Shapes: h hidden, f inner width, /tp where sharded."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.transformer.context import Build
from megatron.kernels.ops.activation import Activation
from megatron.spec.mlp import MLPSpec


class MLP(nn.Module):
    """[s or s/tp, b, h] -> the same."""

    def __init__(self, build: Build, spec: MLPSpec, *, recompute_activation: bool = False) -> None:
        """recompute_activation: fc2 applies the activation, and again in its backward (GEMM-last)."""
        super().__init__()
        self.linear_fc1 = build.column(spec.linear_fc1)
        self.linear_fc2 = build.row(spec.linear_fc2)
        self.activation: Activation | None = build.kernels.fused.activations[spec.activation]
        if recompute_activation:
            self.activation, self.linear_fc2.prologue = None, self.activation

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        inner = self.linear_fc1(x)
        out: Tensor = self.linear_fc2(inner if self.activation is None else self.activation(inner))
        return out
