"""What a pipeline stage does to memory in the forward and the backward of one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.config.pipeline import PipelineSettings
from megatron.config.run import RunConfig
from megatron.planner.attention_memory import AttentionMemory
from megatron.planner.ends_memory import EmbeddingMemory, HeadMemory
from megatron.planner.layer_memory import LayerMemory
from megatron.planner.memory.layer_moves import LayerMoves, Leaving, Returning, keeper, layer_moves
from megatron.planner.memory.offloaded_weights import OffloadedBuckets
from megatron.planner.sizes import ATTENTION, BACKWARD, COMMUNICATION, RESIDUAL, Sizes, comm_type
from megatron.planner.tally import Profile, Tally, profile_of
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import Kind

NONE_OFFLOADED = OffloadedBuckets()


@dataclass(frozen=True)
class StageMemory:
    """A profile for each kind of computation of a schedule. Tensors that pass between stages count as communication.

    away: bytes that have left, layer by layer, when the forward is over.
    """

    forward: Profile
    backward: Profile
    weight_grad: Profile | None  # the rest, where the backward is split
    away: int = 0

    def of(self, kind: Kind) -> Profile:
        """The profile of a computation."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.WEIGHT_GRAD:
            assert self.weight_grad is not None
            return self.weight_grad
        return self.backward


def stage_memory(
    run: RunConfig,
    sizes: Sizes,
    stage: Stage,
    settings: PipelineSettings,
    offloaded: OffloadedBuckets = NONE_OFFLOADED,
    *,
    by_layer: bool = True,
) -> StageMemory:
    """The memory of one of the run's stages. offloaded: its weights that live in host memory. by_layer: the activations that
    the flags offload move layer by layer; else none of them move here."""
    split = settings.schedule.splits_backward
    model = run.model
    modules = run.recompute.modules
    attention = AttentionMemory(model, sizes, comm_type(run), modules, split=split)
    layer = LayerMemory(model, sizes, attention, modules, split=split)
    embedding, head = EmbeddingMemory(model, sizes), HeadMemory(model, sizes, split=split)
    layer_forward = profile_of(layer.forward)
    layer_backward = {owned: profile_of(functools.partial(layer.backward, owned=owned)) for owned in (True, False)}
    # Of a layer in a group that is computed again only the output stays, and of the group that of its last layer.
    kept = {**layer_forward.net, RESIDUAL: layer_forward.net[RESIDUAL] - sizes.residual}
    forget = Profile({kind: -size for kind, size in kept.items()}, {}, "")
    groups = run.recompute.groups(stage.layers)
    offloads = run.activation_offload.kind is not None
    moves = LayerMoves([{}] * len(stage.layers), 0)
    if by_layer:
        moves = layer_moves(run, sizes, stage, layer_forward.net, profile_of(embedding.forward).net)
    place = {number: place for place, number in enumerate(stage.layers)}
    tables = 2 * sizes.s * (sizes.rotary // 2) * sizes.e

    @contextmanager
    def read(tally: Tally, layers: Sequence[int], *, again: bool = False) -> Iterator[None]:
        """Weights of these layers are there for the body."""
        whole = offloaded.fetched(layers, again=again)
        tally.take(COMMUNICATION, whole)
        yield
        tally.free(COMMUNICATION, whole)

    def forward(tally: Tally) -> None:
        if not stage.embedding:
            tally.free(COMMUNICATION, sizes.residual)
            tally.take(RESIDUAL, sizes.residual)
        tally.take(ATTENTION, tables)
        if stage.embedding:
            with tally.doing("embedding"):
                embedding.forward(tally)
        leaving = Leaving(tally, moves)
        for group, again in groups:
            for number in group:
                if not again or number == group[0]:
                    leaving.layer_begins(place[number])
                with tally.doing(f"layer {number}"), read(tally, [number]):
                    tally.play(layer_forward)
                if again:
                    tally.play(forget)
            if again:
                tally.free(RESIDUAL, sizes.residual * (len(group) - 1))
        if stage.head:
            with tally.doing("head"):
                head.forward(tally)
        else:
            tally.free(RESIDUAL, sizes.residual)
            tally.take(COMMUNICATION, sizes.residual)
        leaving.forward_ends()
        if not stage.layers:
            tally.free(ATTENTION, tables)

    def backward(tally: Tally) -> None:
        returning = Returning(tally, moves)
        if stage.head:
            returning.asked(len(stage.layers) - 1)
            with tally.doing("head"):
                head.backward(tally)
        elif not stage.layers:
            tally.take(BACKWARD, sizes.residual)
        for group, again in reversed(groups):
            with read(tally, group if again else (), again=again):
                if again:
                    returning.asked(keeper(place[group[0]]))
                    for number in group:
                        with tally.doing(f"layer {number} again"):
                            tally.play(layer_forward)
                    tally.free(RESIDUAL, sizes.residual)  # the second run ends before its output
                for number in reversed(group):
                    if not again:
                        returning.asked(place[number])
                    with tally.doing(f"layer {number}"), read(tally, () if again else [number]):
                        tally.play(layer_backward[stage.head or number != stage.layers[-1]])
        if stage.layers:
            tally.free(ATTENTION, tables)
        if stage.embedding:
            with tally.doing("embedding"):
                embedding.backward(tally)
        else:
            # The engine holds the stage's input until the end; offload leaves it without its memory.
            tally.brief(COMMUNICATION, 0 if offloads else sizes.residual)
            tally.free(BACKWARD, sizes.residual)
            tally.take(COMMUNICATION, sizes.residual)
        if not stage.head:
            tally.free(COMMUNICATION, sizes.residual)  # the gradient that came

    before, after = profile_of(forward), profile_of(backward)
    if not split:
        return StageMemory(before, after, None, moves.nbytes)
    kinds = {*before.net, *after.net} - {COMMUNICATION}
    left = {kind: -before.net.get(kind, 0) - after.net.get(kind, 0) for kind in kinds}
    return StageMemory(before, after, Profile(left, {}, "weight gradients"), moves.nbytes)
