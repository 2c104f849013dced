"""Feed-forward layer. Shapes: h hidden, f inner width, /tp where sharded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.parameter import Init
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import Build
from megatron.kernels.ops import activation


class MLP(nn.Module):
    """[s or s/tp, b, h] -> the same. The gated form stores gate and up as one [2, f, h] weight sharded on f."""

    def __init__(self, build: Build, init: Init, output_init: Init) -> None:
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

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.linear_fc2(self._activation(self.linear_fc1(x)))


def choose_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The configured activation; only swiglu halves its input."""
    if config.swiglu:
        return activation.swiglu
    if config.squared_relu:
        return activation.squared_relu
    return activation.gelu_tanh if config.openai_gelu else activation.gelu
