"""The decoder layer and the stack of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.recompute import CORE_ATTN, MLP_ACT, NORM, WHOLE_MLP, WHOLE_MOE
from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.core.transformer.core_attention import RecomputedAttention
from megatron.core.transformer.layer_graphs import LayerGraphs
from megatron.core.transformer.lora import add_adapters
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.recompute import SkipsLast, recompute, recompute_module
from megatron.kernels.ops.attention import AttentionKernel
from megatron.spec.moe import MoESpec


class TransformerLayer(nn.Module):
    """The residual layer of LayerSpec. [s or s/tp, b, h] -> the same.

    `number`: the layer's place in the whole model, from 0.
    """

    def __init__(self, build: Build, number: int) -> None:
        super().__init__()
        spec, recomputed = build.spec.layers[number], build.recompute.parts_of(number)
        self.input_layernorm = build.optional_norm(spec.input_norm)
        core = _core_attention(build, number)
        early = core if isinstance(core, AllGatherAttention) else None
        self.self_attention = SelfAttention(
            build,
            spec.attention,
            RecomputedAttention(core, build.rng) if CORE_ATTN in recomputed else core,
            prefetch=None if early is None else early.prefetch,
        )
        self.post_self_attn_layernorm = build.optional_norm(spec.post_attention_norm)
        self.pre_mlp_layernorm = build.optional_norm(spec.pre_mlp_norm)
        self.mlp: MLP | MoELayer = (
            MoELayer(build, spec.mlp, number, recomputed)
            if isinstance(spec.mlp, MoESpec)
            else MLP(build, spec.mlp, recompute_activation=MLP_ACT in recomputed)
        )
        self.post_mlp_layernorm = build.optional_norm(spec.post_mlp_norm)
        add_adapters(self, build, spec)
        self._rng, self._dropout, self._multiplier = build.rng, spec.dropout, spec.residual_multiplier
        self._dtype = build.dtype
        self._stream = "sharded" if build.sequence_parallel else "replicated"
        if NORM in recomputed and self.input_layernorm is not None:
            self.input_layernorm.defer_to(self.self_attention.linear_qkv)
        if isinstance(self.mlp, MoELayer):
            if WHOLE_MOE in recomputed:
                recompute_module(self.mlp, build.rng, last=self.mlp)
        else:
            if NORM in recomputed and self.pre_mlp_layernorm is not None:
                self.pre_mlp_layernorm.defer_to(self.mlp.linear_fc1)
            if WHOLE_MLP in recomputed:
                recompute_module(self.mlp, build.rng, last=self.mlp.linear_fc2)
        self._early = early

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        cache: KeyValueCache | None = None,
        routing: MicrobatchRouting | None = None,
        branch: Tensor | None = None,
        *,
        apart: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See the class. routing: of the microbatch, for a layer with experts.

        branch: is added to x first. apart: returns (stream, branch), whose sum is the result, for the norm that reads it.
        """
        x, read = self._read(x, branch, self.input_layernorm)
        attended = self.self_attention(read, positions, cache)
        del read, branch  # nobody needs them now, unless they were saved
        attended = self._branch(attended, self.post_self_attn_layernorm)
        x, read = self._read(x, attended, self.pre_mlp_layernorm)
        del attended
        out = self.mlp(read, routing) if isinstance(self.mlp, MoELayer) else self.mlp(read)
        out = self._branch(out, self.post_mlp_layernorm)
        return (x, self._marked(out)) if apart else self._marked(x + out)

    def _read(self, x: Tensor, branch: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Returns (the residual stream x + branch; the same as attention or the MLP reads it)."""
        if norm is not None and norm.adds and branch is not None:
            both: tuple[Tensor, Tensor] = norm(x, branch)
            return both
        x = _plus(x, branch)
        return x, x.to(self._dtype) if norm is None else norm(x)

    def _marked(self, x: Tensor) -> Tensor:
        """x itself. The backward of a layer begins at its output: there the gather of keys and values may start, which is
        overlapped with the backward of the MLP."""
        return x if self._early is None else self._early.gather_early(x)

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        """The output of attention or MLP as it is added to the residual stream."""
        x = x if norm is None else norm(x)
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
        self._recompute, self._rng = build.recompute, build.rng
        # Layers leave the last addition to the norm behind them where one kernel computes both.
        self._apart = build.kernels.fused.norm.residual is not None
        self.graphs: LayerGraphs | None = None  # set when parameters have their memory

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        caches: Sequence[KeyValueCache] | None = None,
        routing: MicrobatchRouting | None = None,
        *,
        layers: range,
        final_norm: bool,
    ) -> Tensor:
        """[s or s/tp, b, h] -> the same, through `layers`; one cache for each of them in generation, and without it the
        routing of the microbatch, where there are experts."""
        branch: Tensor | None = None
        if caches is not None:
            for number, cache in zip(layers, caches, strict=True):
                x, branch = self._through(x, branch, positions, cache, None, (number,))
        elif self.graphs is not None and (out := self.graphs.run(x, positions, layers)) is not None:
            x = out
        else:
            for group, again in self._recompute.groups(layers):
                run = functools.partial(self._through, positions=positions, cache=None, routing=routing, layers=group)
                if again:
                    run_whole = functools.partial(_added, run)
                    x = recompute(run_whole, _plus(x, branch), self._rng, last=self._last_gemm(group))
                    branch = None
                else:
                    x, branch = run(x, branch)
        if not final_norm:
            return _plus(x, branch)
        assert self.final_layernorm is not None
        normed: Tensor = self.final_layernorm(x) if branch is None else self.final_layernorm(x, branch)[1]
        return normed

    def _through(
        self,
        x: Tensor,
        branch: Tensor | None,
        positions: Positions,
        cache: KeyValueCache | None,
        routing: MicrobatchRouting | None,
        layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (stream, branch), whose sum is the result; no branch if it was added."""
        for number in layers:
            result = self.layers[str(number)](x, positions, cache, routing, branch, apart=self._apart)
            x, branch = result if self._apart else (result, None)
        return x, branch

    def _last_gemm(self, layers: Sequence[int]) -> SkipsLast | None:
        """The layer that the last of `layers` ends with; None if that is a norm, which keeps its input for backward."""
        layer = self.layers[str(layers[-1])]
        assert isinstance(layer, TransformerLayer)
        if layer.post_mlp_layernorm is not None:
            return None
        return layer.mlp if isinstance(layer.mlp, MoELayer) else layer.mlp.linear_fc2


def _plus(x: Tensor, branch: Tensor | None) -> Tensor:
    """Returns x + branch, or x if there is none."""
    return x if branch is None else x + branch


def _added(run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]], x: Tensor) -> Tensor:
    return _plus(*run(x, None))


def _core_attention(build: Build, number: int) -> AttentionKernel:
    """The kernel, or where the sequence is sharded, one that communicates."""
    groups, kernels = build.groups, build.kernels
    if groups.cp.size == 1:
        return kernels.attention
    return context_parallel_attention(
        build.cp_comm_types[number],
        groups.cp,
        groups.cp_inner,
        groups.cp_outer,
        kernels.attention,
        kernels.block_attention,
        build.cp_trace,
    )
