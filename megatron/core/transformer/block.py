"""The decoder layer and the stack of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.recompute import CORE_ATTN, NORM, WHOLE_MLP
from megatron.core.context_parallel.kinds import context_attention
from megatron.core.context_parallel.steps import InOne, LayerAttention
from megatron.core.memory.checkpoint import checkpoint
from megatron.core.parameter import Init
from megatron.core.transformer.attention import SelfAttention, output_scale
from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.core.transformer.core_attention import RecomputedAttention
from megatron.core.transformer.lora import add_adapters
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x)). [s or s/tp, b, h] -> the same.

    `number`: the layer's place in the whole model, from 0.
    """

    def __init__(self, build: Build, number: int) -> None:
        super().__init__()
        config = build.config
        assert config.hidden_size
        init, output_init = layer_inits(config)
        self.input_layernorm = _hidden_norm(build)
        self.self_attention = SelfAttention(build, init, output_init, config.windows[number], _attention(build, number))
        self.pre_mlp_layernorm = _hidden_norm(build)
        recompute = build.recompute.parts_of(number)
        self.mlp = MLP(build, init, output_init, recompute)
        if config.lora_rank:
            add_adapters(self, build)
        self._rng, self._dropout = build.rng, config.hidden_dropout
        self._recompute = recompute
        self._stream = "sharded" if build.sequence_parallel else "replicated"

    def forward(
        self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None, *, product: bool = True
    ) -> Tensor:
        """See the class. `product` False: without the last product, and so with any values (see RowParallelLinear)."""
        normed, norm = self._normed(self.input_layernorm, x)
        attended, keys = self.self_attention(normed, positions, cache, norm)
        x = x + self._drop(attended)
        x = x + self._drop(self._feed_forward(x, product))
        # The backward begins here: what its attention needs of other ranks travels beside the MLP's gradients.
        return keys.gather_early(x)

    def _normed(self, norm: Norm, x: Tensor) -> tuple[Tensor, Norm | None]:
        """x and the norm that the next layer applies itself, or what is left to do: (norm(x), None)."""
        return (x, norm) if NORM in self._recompute else (norm(x), None)

    def _feed_forward(self, x: Tensor, product: bool) -> Tensor:
        normed, norm = self._normed(self.pre_mlp_layernorm, x)
        if WHOLE_MLP in self._recompute:
            run = functools.partial(self.mlp, norm=norm)
            return checkpoint(run, [normed], self._rng, again=functools.partial(run, product=False))
        out: Tensor = self.mlp(normed, norm, product=product)
        return out

    def _drop(self, x: Tensor) -> Tensor:
        if self._dropout == 0.0 or not self.training:
            return x
        with self._rng.stream(self._stream):
            return F.dropout(x, self._dropout)


class TransformerBlock(nn.Module):
    """The layers of some stages, and the final norm where one of them is the last.

    Layers are keyed by their number in the whole model, so parameter names do not depend on the pipeline split.
    """

    def __init__(self, build: Build, layers: Sequence[int], *, final_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): TransformerLayer(build, number) for number in layers})
        self.final_layernorm = _hidden_norm(build) if final_norm else None
        self._recompute, self._rng = build.recompute, build.rng

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        caches: Sequence[KeyValueCache] | None = None,
        *,
        layers: range,
        final_norm: bool,
    ) -> Tensor:
        """[s or s/tp, b, h] -> the same, through `layers`; one cache for each of them in generation."""
        if caches is not None:
            for number, cache in zip(layers, caches, strict=True):
                x = self.layers[str(number)](x, positions, cache)
        else:
            for group, again in self._recompute.groups(layers):
                run = functools.partial(self._through, positions=positions, layers=group)
                unfinished = functools.partial(run, product=False)
                x = checkpoint(run, [x], self._rng, again=unfinished) if again else run(x)
        if not final_norm:
            return x
        assert self.final_layernorm is not None
        normed: Tensor = self.final_layernorm(x)
        return normed

    def _through(self, x: Tensor, positions: Positions, layers: Sequence[int], product: bool = True) -> Tensor:
        for number in layers:
            x = self.layers[str(number)](x, positions, product=product or number != layers[-1])
        return x


def _attention(build: Build, number: int) -> LayerAttention:
    """What a layer attends with, run again in backward if that is asked for."""
    attention = _attention_once(build, number)
    return RecomputedAttention(attention, build.rng) if CORE_ATTN in build.recompute.parts_of(number) else attention


def _attention_once(build: Build, number: int) -> LayerAttention:
    """A kernel, or where the sequence is cut, one that gets at the rest of it."""
    groups, kernels = build.groups, build.kernels
    if groups.cp.size == 1:
        return InOne(kernels.attention)
    return context_attention(
        build.cp_comm_types[number],
        groups.cp,
        groups.cp_inner,
        groups.cp_outer,
        kernels.attention,
        kernels.block_attention,
        build.cp_watch,
    )


def layer_inits(config: ModelConfig) -> tuple[Init, Init]:
    """Initial values of a layer's inner weights and of those that write to the residual stream."""
    assert config.num_layers and config.hidden_size
    scale = output_scale(config.num_layers) if config.apply_output_scale_init else 1.0
    if config.init_method_xavier_uniform:
        return Init("xavier", 1.0), Init("xavier", 1.0)
    return Init("normal", config.init_method_std), Init("normal", config.init_method_std * scale)


def _hidden_norm(build: Build) -> Norm:
    assert build.config.hidden_size
    return Norm(
        build.config.hidden_size,
        build.config,
        tp=build.groups.tp,
        sum_over_tp=build.sequence_parallel,
        dtype=build.dtype,
        device=build.device,
    )
