"""Feed-forward layer. Shapes: h hidden, f inner width, /tp where sharded."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.recompute import MLP_ACT
from megatron.core.parameter import Init
from megatron.core.tensor_parallel.gemm_last import Prologue
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import Build
from megatron.kernels.ops import activation


class MLP(nn.Module):
    """[s or s/tp, b, h] -> the same. The gated form stores gate and up as one [2, f, h] weight sharded on f."""

    def __init__(self, build: Build, init: Init, output_init: Init, recompute: frozenset[str] = frozenset()) -> None:
        """`recompute`: parts of the layer that backward computes again."""
        super().__init__()
        config = build.config
        assert config.hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            (2, config.ffn_dim) if config.swiglu else (config.ffn_dim,),
            shard_dim=1 if config.swiglu else 0,
            bias=config.add_bias_linear,
            init=init,
            tp=build.groups.tp,
            sequence_parallel=build.sequence_parallel,
            weight_grad=build.kernels.weight_grad,
            dtype=build.dtype,
            device=build.device,
            overlap=build.overlap,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=output_init,
            tp=build.groups.tp,
            sequence_parallel=build.sequence_parallel,
            weight_grad=build.kernels.weight_grad,
            dtype=build.dtype,
            device=build.device,
            overlap=build.overlap,
        )
        self._activation = choose_activation(config)
        self._recompute = recompute

    def forward(self, x: Tensor, norm: Prologue | None = None, *, product: bool = True) -> Tensor:
        """See the class. `norm`: of x, which fc1 computes, and again in its backward. `product`: see RowParallelLinear."""
        inner: Tensor = self.linear_fc1(x, norm)
        if MLP_ACT in self._recompute:
            out: Tensor = self.linear_fc2(inner, self._activation, product=product)
        else:
            out = self.linear_fc2(self._activation(inner), product=product)
        return out


def choose_activation(config: ModelConfig) -> activation.Activation:
    """The configured activation; only swiglu halves its input."""
    if config.swiglu:
        return activation.swiglu
    if config.squared_relu:
        return activation.squared_relu
    return activation.gelu_tanh if config.tanh_gelu else activation.gelu
