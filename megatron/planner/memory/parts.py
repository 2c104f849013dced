"""The layers and the two ends of a decoder as work that takes and leaves memory, of which stages are composed.

The work of one size of a microbatch is a `Profile`, with kinds and names; that of many sizes is `Levels`, sums of all
kinds. Bytes are integers, or arrays with one number for each of the sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import MLP_ACT, NORM, RecomputeConfig
from megatron.planner.memory.levels import Levels, ManyBytes
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.linear import LinearSpec
from megatron.spec.memory.embedding import EmbeddingMemory
from megatron.spec.memory.head import HeadMemory
from megatron.spec.memory.layer import LayerMemory, recomputed
from megatron.spec.memory.prediction import rotary_tables
from megatron.spec.memory.trace import (
    ATTN_NORM,
    ATTN_PROJ,
    CORE_ATTN,
    EMBEDDING,
    MLP_FC1,
    MLP_FC2,
    MLP_NORM,
    POST_ATTN_NORM,
    POST_MLP_NORM,
    QKV_LINEAR,
    RESIDUAL,
    ROUTING,
    WORK,
    LevelTrace,
    MemoryTrace,
    profile_of,
)
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import Sizes


@dataclass(frozen=True)
class LayerParts:
    """The work of a layer.

    backward: by whether the layer alone holds the gradient of its output. forget, again: see `recomputed`. saved: bytes
    by kind that the forward leaves and that can move to host memory. share: the part of them that the flags of
    --fine-grained-activation-offloading move. weight_grad: bytes of work space of the largest gradient of a weight,
    where it is rounded to bf16.
    """

    forward: Any
    backward: Mapping[bool, Any]
    forget: Any
    again: Mapping[bool, Any]
    saved: Mapping[str, Any]
    share: Any
    weight_grad: Any


@dataclass(frozen=True)
class EndParts:
    """The work of the embedding and the head.

    embedded: bytes by kind that the embedding leaves besides the residual stream. residual: bytes of the residual
    stream. rotary: of the rotary tables. weight_grad: as of a layer, for the output layer.
    """

    embedding: Any
    embedding_backward: Any
    head: Any
    head_backward: Any
    embedded: Mapping[str, Any]
    residual: Any
    rotary: Any
    weight_grad: Any


class DecoderProfiles:
    """The profiles of a decoder's parts, each made once for all layers that are alike."""

    def __init__(
        self, spec: DecoderSpec, sizes: Sizes, recompute: RecomputeConfig, offload: ActivationOffloadConfig
    ) -> None:
        self._spec, self._sizes, self._recompute, self._offload = spec, sizes, recompute, offload
        self._layers: dict[tuple[int, bool], LayerParts] = {}

    @functools.cached_property
    def ends(self) -> EndParts:
        """The profiles of the ends."""
        spec, sizes = self._spec, self._sizes
        embedding = EmbeddingMemory(spec.embedding, sizes)
        head = HeadMemory(spec, sizes, self._recompute.modules, whole=self._recompute.is_full)
        first = profile_of(embedding.forward)
        return EndParts(
            first,
            profile_of(embedding.backward),
            profile_of(head.forward),
            profile_of(head.backward),
            {kind: size for kind, size in first.net.items() if kind != RESIDUAL},
            sizes.residual,
            rotary_tables(spec, sizes),
            _rounding(sizes, [spec.output]),
        )

    def layer(self, number: int) -> LayerParts:
        """Returns the profiles of a layer."""
        # Most layers are alike, and alike layers are one object. (They would compare equal with another dropout, too.)
        sizes = self._sizes.of_layer(number)
        kind = (id(self._spec.layers[number]), sizes.fp8 is None)
        if kind not in self._layers:
            memory = LayerMemory(self._spec.layers[number], sizes, self._recompute.modules)
            forward = profile_of(memory.forward)
            self._layers[kind] = LayerParts(
                forward,
                {owned: profile_of(functools.partial(memory.backward, owned=owned)) for owned in (True, False)},
                *recomputed(memory, forward, sizes),
                {kind: size for kind, size in forward.net.items() if kind != ROUTING},
                _share(self._offload, self._recompute.modules, memory),
                _weight_grad(self._spec.layers[number], sizes),
            )
        return self._layers[kind]


def layer_levels(
    layer: LayerSpec, sizes: Sequence[Sizes], modules: Sequence[frozenset[str]], offload: ActivationOffloadConfig
) -> LayerParts:
    """Returns the levels of a layer for K sizes, with the parts that backward computes again for each."""
    rows = []
    for one, again in zip(sizes, modules, strict=True):
        memory = LayerMemory(layer, one, again)
        forward = _level(memory.forward)
        backward, last = (_level(functools.partial(memory.backward, owned=owned)) for owned in (True, False))
        ending = _level(memory.forward_again)
        rows.append(
            (
                *(forward.level, forward.peak, backward.level, backward.peak, last.level, last.peak),
                *(forward.level - forward.routing, forward.peak - forward.routing_at_peak),
                *(forward.level - forward.routing, ending.peak - ending.routing_at_peak),
                *(forward.residual, forward.routing + one.residual - forward.level),
                *(_share(offload, again, memory), _weight_grad(layer, one)),
            )
        )
    columns = np.array(rows, np.float64).T
    forward_levels, owned_levels, last_levels, again_levels, ending_levels = _pairs(columns[:10])
    residual, forgotten, share, weight_grad = columns[10:]
    return LayerParts(
        forward_levels,
        {True: owned_levels, False: last_levels},
        Levels(forgotten, np.zeros_like(forgotten)),
        {False: again_levels, True: ending_levels},
        {RESIDUAL: residual, WORK: again_levels.kept - residual},
        share,
        weight_grad,
    )


def end_levels(spec: DecoderSpec, sizes: Sequence[Sizes], again: Sequence[tuple[frozenset[str], bool]]) -> EndParts:
    """Returns the levels of the ends for K sizes. again: the parts of the layers of predictions that are recomputed,
    and whether whole layers are."""
    rows = []
    for one, (modules, whole) in zip(sizes, again, strict=True):
        embedding, head = EmbeddingMemory(spec.embedding, one), HeadMemory(spec, one, modules, whole=whole)
        traces = [_level(work) for work in (embedding.forward, embedding.backward, head.forward, head.backward)]
        embedded = traces[0].level - traces[0].residual
        levels = (level for trace in traces for level in (trace.level, trace.peak))
        rows.append((*levels, embedded, one.residual, rotary_tables(spec, one), _rounding(one, [spec.output])))
    columns = np.array(rows, np.float64).T
    embedded, residual, rotary, weight_grad = columns[8:]
    before, before_backward, after, after_backward = _pairs(columns[:8])
    return EndParts(
        before, before_backward, after, after_backward, {EMBEDDING: embedded}, residual, rotary, weight_grad
    )


def _level(work: Callable[[MemoryTrace], None]) -> LevelTrace:
    trace = LevelTrace()
    work(trace)
    return trace


def _pairs(columns: ManyBytes) -> list[Levels]:
    """Levels, each in two columns."""
    return [Levels(columns[place], columns[place + 1]) for place in range(0, len(columns), 2)]


def _weight_grad(layer: LayerSpec, sizes: Sizes) -> int:
    """The work space of a layer's largest weight gradient, if it is rounded to bf16."""
    experts = []
    if sizes.load is not None and isinstance(layer.mlp, MoESpec):
        spec = layer.mlp.experts
        experts.append(sizes.load.experts * (spec.hidden * spec.width * (2 if spec.gated else 1) // sizes.load.etp))
    return _rounding(sizes, layer.linears().values(), experts)


def _rounding(sizes: Sizes, linears: Iterable[LinearSpec], others: Sequence[int] = ()) -> int:
    """The work space of the largest gradient. others: elements of more weights."""
    if not sizes.rounds_grads:
        return 0
    largest = max([*(math.prod(linear.local_features(sizes.tp)) for linear in linears), *others], default=0)
    return sizes.grad_sum(largest) + sizes.grad_bits(largest)


def _share(offload: ActivationOffloadConfig, again: frozenset[str], layer: LayerMemory) -> float:
    """The share of the bytes that a layer saves. A storage moves with any part that saves it; a linear layer saves the
    input of the norm or activation that it computes again."""
    if offload.kind != "modules":
        return 1.0
    parts = {part: size for part, size in layer.kept_by_part().items() if part != ROUTING}
    named = set(offload.offload_modules or ())
    for part, behind in ((ATTN_NORM, POST_ATTN_NORM), (MLP_NORM, POST_MLP_NORM)):
        if part in named:
            named.add(behind)
    for name, part, linear in (
        (NORM, ATTN_NORM, QKV_LINEAR),
        (NORM, MLP_NORM, MLP_FC1),
        (MLP_ACT, MLP_ACT, MLP_FC2),
    ):
        if name in again and linear in named:
            named.add(part)
    if CORE_ATTN in named and layer.core_saves_output:
        named.add(ATTN_PROJ)  # its input is the output that a fused kernel saves
    return sum(parts[name] for name in named) / sum(parts.values())
