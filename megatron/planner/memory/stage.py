"""The memory of a pipeline stage in the forward and the backward of one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.planner.memory.layer_moves import LayerMoves, Leaving, Returning, keeper, layer_moves
from megatron.planner.memory.offloaded_weights import OffloadedBuckets
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import Kind
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.memory.ends import EmbeddingMemory, HeadMemory
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.trace import (
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    RESIDUAL,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.sizes import Sizes

NONE_OFFLOADED = OffloadedBuckets()


@dataclass(frozen=True)
class StageMemory:
    """A profile for each kind of computation of a schedule. Tensors that pass between stages count as communication.

    offloaded: bytes that have been offloaded, layer by layer, when the forward is over.
    """

    forward: Profile
    backward: Profile
    weight_grad: Profile | None  # the rest, where the backward is split
    offloaded: int = 0

    def of(self, kind: Kind) -> Profile:
        """The profile of a computation."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.WEIGHT_GRAD:
            assert self.weight_grad is not None
            return self.weight_grad
        return self.backward


@dataclass(frozen=True)
class _LayerProfiles:
    """A layer's memory, and its profiles. backward: by whether nothing else holds the gradient that arrives.

    forget: of a layer in a group that is computed again only the output stays, and of the group that of its last layer.
    """

    memory: LayerMemory
    forward: Profile
    backward: dict[bool, Profile]
    forget: Profile


def _profiles(layer: LayerSpec, sizes: Sizes, modules: frozenset[str]) -> _LayerProfiles:
    memory = LayerMemory(layer, sizes, modules)
    forward = profile_of(memory.forward)
    kept = {**forward.net, RESIDUAL: forward.net[RESIDUAL] - sizes.residual}
    return _LayerProfiles(
        memory,
        forward,
        {owned: profile_of(functools.partial(memory.backward, owned=owned)) for owned in (True, False)},
        Profile({kind: -size for kind, size in kept.items()}, {}, "", {}),
    )


def stage_memory(
    spec: DecoderSpec,
    sizes: Sizes,
    stage: Stage,
    recompute: RecomputeConfig,
    offload: ActivationOffloadConfig,
    offloaded: OffloadedBuckets = NONE_OFFLOADED,
    *,
    by_layer: bool = True,
) -> StageMemory:
    """The memory of one stage of the decoder.

    offloaded: its weights that live in host memory. by_layer: the activations that the flags offload move layer by layer;
    else none of them move here.
    """
    # Most layers are alike, and alike layers are one object. (They would compare equal with another dropout, too.)
    kinds = {id(layer): layer for layer in (spec.layers[number] for number in stage.layers)}
    profiles = {kind: _profiles(layer, sizes, recompute.modules) for kind, layer in kinds.items()}
    layers = {number: profiles[id(spec.layers[number])] for number in stage.layers}
    embedding, head = EmbeddingMemory(spec.embedding, sizes), HeadMemory(spec, sizes)
    groups = recompute.groups(stage.layers)
    moves = LayerMoves([{}] * len(stage.layers), 0)
    if by_layer:
        memories = [layers[number].memory for number in stage.layers]
        moves = layer_moves(offload, recompute, sizes, stage, memories, profile_of(embedding.forward).net)
    place = {number: place for place, number in enumerate(stage.layers)}
    tables = 2 * sizes.s * (spec.rotary.channels // 2) * sizes.e if spec.rotary is not None else 0

    @contextmanager
    def read(trace: MemoryTrace, layers: Sequence[int], *, again: bool = False) -> Iterator[None]:
        """Weights of these layers are there for the body."""
        whole = offloaded.fetched(layers, again=again)
        trace.take(COMMUNICATION, whole)
        yield
        trace.free(COMMUNICATION, whole)

    def forward(trace: MemoryTrace) -> None:
        if not stage.embedding:
            trace.free(COMMUNICATION, sizes.residual)
            trace.take(RESIDUAL, sizes.residual)
        trace.take(ATTENTION, tables)
        if stage.embedding:
            with trace.doing("embedding"):
                embedding.forward(trace)
        leaving = Leaving(trace, moves)
        for group, again in groups:
            for number in group:
                if not again or number == group[0]:
                    leaving.layer_begins(place[number])
                with trace.doing(f"layer {number}"), read(trace, [number]):
                    trace.replay(layers[number].forward)
                if again:
                    trace.replay(layers[number].forget)
            if again:
                trace.free(RESIDUAL, sizes.residual * (len(group) - 1))
        if stage.head:
            with trace.doing("head"):
                head.forward(trace)
        else:
            trace.free(RESIDUAL, sizes.residual)
            trace.take(COMMUNICATION, sizes.residual)
        leaving.forward_ends()
        if not stage.layers:
            trace.free(ATTENTION, tables)

    def backward(trace: MemoryTrace) -> None:
        returning = Returning(trace, moves)
        if stage.head:
            returning.asked(len(stage.layers) - 1)
            with trace.doing("head"):
                head.backward(trace)
        elif not stage.layers:
            trace.take(BACKWARD, sizes.residual)
        for group, again in reversed(groups):
            with read(trace, group if again else (), again=again):
                if again:
                    returning.asked(keeper(place[group[0]]))
                    for number in group:
                        with trace.doing(f"layer {number} again"):
                            trace.replay(layers[number].forward)
                    trace.free(RESIDUAL, sizes.residual)  # the second run ends before its output
                for number in reversed(group):
                    if not again:
                        returning.asked(place[number])
                    with trace.doing(f"layer {number}"), read(trace, () if again else [number]):
                        trace.replay(layers[number].backward[stage.head or number != stage.layers[-1]])
        if stage.layers:
            trace.free(ATTENTION, tables)
        if stage.embedding:
            with trace.doing("embedding"):
                embedding.backward(trace)
        else:
            # The engine holds the stage's input until the end; offload leaves it without its memory.
            trace.use(COMMUNICATION, 0 if offload.kind is not None else sizes.residual)
            trace.free(BACKWARD, sizes.residual)
            trace.take(COMMUNICATION, sizes.residual)
        if not stage.head:
            trace.free(COMMUNICATION, sizes.residual)  # the gradient that came

    before, after = profile_of(forward), profile_of(backward)
    if not sizes.split_backward:
        return StageMemory(before, after, None, moves.nbytes)
    used = {*before.net, *after.net} - {COMMUNICATION}
    left = {kind: -before.net.get(kind, 0) - after.net.get(kind, 0) for kind in used}
    return StageMemory(before, after, Profile(left, {}, "weight gradients", {}), moves.nbytes)
