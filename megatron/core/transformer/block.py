"""The decoder layer and the stack of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.recompute import CORE_ATTN, MLA_UP_PROJ, MLP_ACT, NORM, WHOLE_MLP, WHOLE_MOE
from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.groups import Group
from megatron.core.transformer.attention import AttentionLayer, LatentAttention, SelfAttention
from megatron.core.transformer.context import Build, LayerCache, Positions
from megatron.core.transformer.core_attention import RecomputedAttention
from megatron.core.transformer.delta_net import GatedDeltaNet
from megatron.core.transformer.layer_graphs import LayerGraphs
from megatron.core.transformer.lora import add_adapters
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.recompute import SkipsLast, recompute, recompute_module
from megatron.core.transformer.residual import Residual, total
from megatron.kernels.ops.attention import AttentionKernel
from megatron.spec.decoder import LayerSpec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.moe import MoESpec

X = TypeVar("X", Tensor, Residual)  # the residual stream of a layer


class TransformerLayer(nn.Module):
    """The residual layer of LayerSpec. [s or s/tp, b, h] -> the same.

    `number`: see DecoderSpec.layer.
    """

    def __init__(self, build: Build, number: int) -> None:
        super().__init__()
        spec, recomputed = build.spec.layer(number), build.recompute.parts_of(number)
        self.input_layernorm = build.stream_norm(spec.input_norm)
        self.self_attention, core = _attention(build, number, spec, recomputed)
        self.post_self_attn_layernorm = build.stream_norm(spec.post_attention_norm)
        self.pre_mlp_layernorm = build.stream_norm(spec.pre_mlp_norm)
        self.mlp: MLP | MoELayer = (
            MoELayer(build, spec.mlp, number, recomputed)
            if isinstance(spec.mlp, MoESpec)
            else MLP(build, spec.mlp, recompute_activation=MLP_ACT in recomputed)
        )
        self.post_mlp_layernorm = build.stream_norm(spec.post_mlp_norm)
        add_adapters(self, build, spec)
        self._rng, self._dropout, self._multiplier = build.rng, spec.dropout, spec.residual_multiplier
        self._parallel, self._shares_norm = spec.parallel, spec.shares_norm
        self._stream = "sharded" if build.sequence_parallel else "replicated"
        assert not (self._shares_norm and NORM in recomputed)  # a rule says so
        if NORM in recomputed and isinstance(self.input_layernorm, Norm):
            self.input_layernorm.defer_to(*self.self_attention.readers)
        chunk = build.recompute.mlp_chunk_size
        if isinstance(self.mlp, MoELayer):
            if chunk is not None:
                self.mlp.compute_in_chunks(chunk)
            if WHOLE_MOE in recomputed:
                recompute_module(self.mlp, build.rng, last=self.mlp)
        else:
            norm: Norm | None = None
            if NORM in recomputed and isinstance(self.pre_mlp_layernorm, Norm):
                norm = self.pre_mlp_layernorm
                norm.defer_to(self.mlp.linear_fc1)
            if chunk is not None:
                self.mlp.compute_in_chunks(chunk, norm)
            elif WHOLE_MLP in recomputed:
                recompute_module(self.mlp, build.rng, last=self.mlp)
        if isinstance(core, AllGatherAttention):
            self.register_forward_hook(functools.partial(_gather_early, core))

    @property
    def last_gemm(self) -> SkipsLast | None:
        """What the layer ends with; None if that is a norm, which keeps its input for backward."""
        return None if isinstance(self.post_mlp_layernorm, Norm) else self.mlp

    def forward(
        self,
        x: X,
        positions: Positions,
        cache: LayerCache | None = None,
        routing: MicrobatchRouting | None = None,
    ) -> X:
        """See the class. Returns a tensor for a tensor, and a Residual for a Residual: [Note: pending addition].

        routing: of the microbatch, for a layer with experts.
        """
        if self._shares_norm:
            normed = self.input_layernorm(x)
            return x + self._attention(normed, positions, cache) + self._feed_forward(normed, routing)
        h = x + self._attention(self.input_layernorm(x), positions, cache)
        return h + self._feed_forward(self.pre_mlp_layernorm(x if self._parallel else h), routing)

    def _attention(self, normed: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        attended = self.self_attention(normed, positions, cache)
        return self._scaled(self.post_self_attn_layernorm(attended))

    def _feed_forward(self, normed: Tensor, routing: MicrobatchRouting | None) -> Tensor:
        options = (routing,) if isinstance(self.mlp, MoELayer) else ()
        return self._scaled(self.post_mlp_layernorm(self.mlp(normed, *options)))

    def _scaled(self, x: Tensor) -> Tensor:
        """Returns x, times the residual multiplier, after dropout."""
        if self._multiplier != 1.0:
            x = x * self._multiplier
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
        self.final_layernorm = build.norm(build.spec.final_norm) if final_norm else None
        self._build, self._recompute, self._rng = build, build.recompute, build.rng
        self.graphs: LayerGraphs | None = None  # set when parameters have their memory

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        caches: Sequence[LayerCache] | None = None,
        routing: MicrobatchRouting | None = None,
        *,
        layers: range,
        final_norm: bool,
    ) -> Tensor:
        """[s or s/tp, b, h] -> the same, through `layers`; one cache for each of them in generation. routing: of the
        microbatch, where there are experts."""
        stream = residual_stream(self._build, x)
        del x  # which the stream holds as long as it is needed
        if caches is not None:
            for number, cache in zip(layers, caches, strict=True):
                stream = self.layers[str(number)](stream, positions, cache, routing)
        elif self.graphs is not None and (out := self.graphs.run(total(stream), positions, layers)) is not None:
            stream = out
        else:
            for group, recomputed in self._recompute.groups(layers):
                run = functools.partial(self._through, positions=positions, routing=routing, layers=group)
                if recomputed:
                    run_whole = functools.partial(self._on_tensors, run)
                    layer = self.layers[str(group[-1])]
                    assert isinstance(layer, TransformerLayer)
                    stream = residual_stream(
                        self._build, recompute(run_whole, total(stream), self._rng, last=layer.last_gemm)
                    )
                else:
                    stream = run(stream)
        if not final_norm:
            return total(stream)
        assert self.final_layernorm is not None
        normed: Tensor = self.final_layernorm(stream)
        return normed

    def _through(
        self, stream: Tensor | Residual, positions: Positions, routing: MicrobatchRouting | None, layers: Sequence[int]
    ) -> Tensor | Residual:
        for number in layers:
            stream = self.layers[str(number)](stream, positions, None, routing)
        return stream

    def _on_tensors(self, run: Callable[[Tensor | Residual], Tensor | Residual], x: Tensor) -> Tensor:
        return total(run(residual_stream(self._build, x)))


def residual_stream(build: Build, x: Tensor) -> Tensor | Residual:
    """Returns a residual stream that begins with x [s or s/tp, b, h]."""
    return x if build.kernels.fused.norm.residual is None else Residual(x)


def _gather_early(attention: AllGatherAttention, layer: nn.Module, arguments: Any, out: Any) -> Any:
    """A hook behind a layer: its backward begins at the output, and there the gather of keys and values may start.

    The gather is overlapped with the backward of the MLP.
    """
    return out.marked(attention.gather_early) if isinstance(out, Residual) else attention.gather_early(out)


def _attention(
    build: Build, number: int, spec: LayerSpec, recomputed: Collection[str]
) -> tuple[AttentionLayer | GatedDeltaNet, AttentionKernel | None]:
    """Returns the attention of a layer and its kernel, or the delta net that it has instead."""
    if isinstance(spec.attention, DeltaNetSpec):
        delta_net = GatedDeltaNet(build, spec.attention, _comm_type(build, number), recomputes=CORE_ATTN in recomputed)
        return delta_net, None
    core, sized = _core_attention(build, number, build.groups.cp), dict[int, AttentionKernel]()
    for size, group in build.groups.contexts.items():
        sized[size] = _core_attention(build, number, group)
    attend = core
    if CORE_ATTN in recomputed:
        attend = RecomputedAttention(core, build.rng)
        sized = {size: RecomputedAttention(kernel, build.rng) for size, kernel in sized.items()}
    prefetch = core.prefetch if isinstance(core, AllGatherAttention) else None
    if isinstance(spec.attention, LatentAttentionSpec):
        again = MLA_UP_PROJ in recomputed
        return LatentAttention(build, spec.attention, attend, prefetch, sized, recomputes=again), core
    return SelfAttention(build, spec.attention, attend, prefetch, sized), core


def _comm_type(build: Build, number: int) -> str:
    """Returns the --cp-comm-type of a layer; layers of predictions have the last one's."""
    types = build.cp_comm_types
    return types[min(number, len(types) - 1)] if types else "p2p"


def _core_attention(build: Build, number: int, cp: Group) -> AttentionKernel:
    """The kernel, or where the ranks of `cp` share the sequence, one that communicates."""
    groups, kernels = build.groups, build.kernels
    if cp.size == 1:
        return kernels.attention
    return context_parallel_attention(
        _comm_type(build, number),
        cp,
        groups.cp_inner,
        groups.cp_outer,
        kernels.attention,
        kernels.block_attention,
        build.cp_trace,
    )
