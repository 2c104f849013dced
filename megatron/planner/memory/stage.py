"""The memory of a pipeline stage in the forward and the backward of one microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.planner.memory.layer_moves import LayerMoves, keeper, layer_moves, nothing_moves
from megatron.planner.memory.levels import ArrayTrace
from megatron.planner.memory.offloaded_weights import OffloadedBuckets
from megatron.planner.memory.parts import DecoderProfiles, EndParts, LayerParts
from megatron.schedule.partition import Stage
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    RESIDUAL,
    WORK,
    MemoryTrace,
    profile_of,
)

StageTrace = MemoryTrace | ArrayTrace
NONE_OFFLOADED = OffloadedBuckets()


@dataclass(frozen=True)
class StageMemory:
    """The work of a stage for one microbatch: profiles, or levels. Messages between stages count as communication.

    head: the first part of the backward of a stage with the head, before which no gradient of the stage is complete;
    nothing in other stages. backward: the rest of it, or of the first half of a split one. weight_grad: the work space
    of the second half. by_layer: bytes of each layer's group that are offloaded layer by layer.
    """

    forward: Any
    head: Any
    backward: Any
    weight_grad: Any
    by_layer: tuple[Any, ...]


def stage_memory(events: StageEvents, measure: Callable[[Callable[[Any], None]], Any]) -> StageMemory:
    """Returns the memory of a stage. measure: `profile_of`, or `levels_of` for many sizes."""
    return StageMemory(
        measure(events.forward),
        measure(events.head_backward),
        measure(events.backward),
        measure(events.weight_grad),
        events.moves.by_layer,
    )


def stage_events(
    stage: Stage,
    recompute: RecomputeConfig,
    offload: ActivationOffloadConfig,
    profiles: DecoderProfiles,
    offloaded: OffloadedBuckets = NONE_OFFLOADED,
    *,
    by_layer: bool = True,
) -> StageEvents:
    """Returns the events of a stage for one size of a microbatch.

    offloaded: the buckets of the stage's weights that live in host memory. by_layer: the activations that the flags
    offload leave the device layer by layer; if it is False, the schedule offloads them, and these events do not include
    it.
    """
    layers, moves = [profiles.layer(number) for number in stage.layers], nothing_moves(len(stage.layers))
    if by_layer and offload.kind is not None:
        ratio = (offload.ratio or 0.0) if offload.kind == "ratio" else 0.0
        moves = layer_moves(offload, recompute, layers, profiles.ends, embedding=stage.embedding, ratio=ratio)
    return StageEvents(stage, layers, profiles.ends, recompute, moves, offloaded, holds_input=offload.kind is None)


@dataclass(frozen=True)
class SavedActivations:
    """nbytes: activations that the forward of a stage leaves for its backward, if none leave the device. by_layer: as
    `StageMemory.by_layer`."""

    nbytes: int
    by_layer: tuple[int, ...]


def saved_activations(
    stage: Stage, recompute: RecomputeConfig, offload: ActivationOffloadConfig, profiles: DecoderProfiles
) -> SavedActivations:
    """Returns what `stage_memory` says about a stage's activations. Arguments as for `stage_events`."""
    by_layer, whole = (stage_events(stage, recompute, offload, profiles, by_layer=moves) for moves in (True, False))
    net = profile_of(whole.forward).net
    return SavedActivations(sum(net.get(kind, 0) for kind in ACTIVATIONS), by_layer.moves.by_layer)


class _Step(NamedTuple):
    """A layer, or layers that backward recomputes as one.

    places: of the layers in the stage. leaves: places whose groups leave the device before its forward. returns: those
    that return before its backward. alike: equal for steps that take the same memory.
    """

    places: range
    again: bool
    leaves: range
    returns: range
    alike: Sequence[object]


class StageEvents:
    """Reports what the forward and the backward of one microbatch take and free in a stage, in the order of the run.

    layers: of the stage, one object for layers that are alike. moves: activations that leave the device layer by layer.
    offloaded: as for `stage_events`. holds_input: the engine holds the stage's input until the backward ends;
    activation offload leaves it without its memory.
    """

    def __init__(
        self,
        stage: Stage,
        layers: Sequence[LayerParts],
        ends: EndParts,
        recompute: RecomputeConfig,
        moves: LayerMoves,
        offloaded: OffloadedBuckets = NONE_OFFLOADED,
        *,
        holds_input: bool,
    ) -> None:
        self._stage, self._layers, self._ends, self._offloaded = stage, layers, ends, offloaded
        self._held_input = ends.residual if holds_input else 0
        self.moves = moves
        self._steps = self._steps_of(recompute)

    def forward(self, trace: StageTrace) -> None:
        """Reports the forward."""
        self._begin_forward(trace)
        for _, alike in itertools.groupby(self._steps, lambda step: step.alike):
            trace.repeat(list(alike), self._forward_step)
        self._end_forward(trace)
        left, count = self._steps[-1].leaves.stop if self._steps else 0, len(self._layers)
        self._leave(trace, range(left, max(left, count - 1)))  # all groups but the last one
        if count > 1:
            trace.free(RESIDUAL, self.moves.held)
        if not count:
            trace.free(ATTENTION, self._ends.rotary)

    def head_backward(self, trace: StageTrace) -> None:
        """Reports the backward of the head, with which that of its stage begins; nothing in other stages."""
        if not self._stage.head:
            return
        count = len(self._layers)
        self._return(trace, range(max(0, count - 2), count))
        with trace.doing("head"):
            trace.replay(self._ends.head_backward)

    def backward(self, trace: StageTrace) -> None:
        """Reports the backward, or the first half of a split one, behind the head."""
        if not self._stage.head and not self._layers:
            trace.take(BACKWARD, self._ends.residual)
        for _, alike in itertools.groupby(reversed(self._steps), lambda step: step.alike):
            trace.repeat(list(alike), self._backward_step)
        if self._layers:
            trace.free(ATTENTION, self._ends.rotary)
        self._end_backward(trace)

    def weight_grad(self, trace: StageTrace) -> None:
        """Reports the second half of a split backward, before the operands of its products are freed."""
        with trace.doing("weight gradients"):
            for layer in {id(layer): layer for layer in self._layers}.values():
                trace.use(WORK, layer.weight_grad)
            if self._stage.head:
                trace.use(WORK, self._ends.weight_grad)

    def _steps_of(self, recompute: RecomputeConfig) -> list[_Step]:
        """The stage's layers, with the groups that leave and return around each; see layer_moves.py."""
        groups = [
            (layers, again)
            for part, again in recompute.groups(range(len(self._layers)))
            for layers in ([range(part[0], part[-1] + 1)] if again else [range(place, place + 1) for place in part])
        ]
        left, leaves = 0, []
        for layers, _ in groups:
            leaves.append(range(left, max(left, layers[0] - 1)))
            left = leaves[-1].stop
        back = max(0, len(self._layers) - 2) if self._stage.head else len(self._layers)
        kinds, moved = tuple(map(id, self._layers)), tuple(map(id, self.moves.away))
        steps = []
        for (layers, again), leaving in zip(reversed(groups), reversed(leaves), strict=True):
            read = keeper(layers[0]) if again else layers[0]
            returns = range(max(0, min(back, read - 1)), back)
            back = returns.start
            same = (
                kinds[layers.start : layers.stop],
                moved[leaving.start : leaving.stop],
                moved[returns.start : returns.stop],
                again,
                0 in leaving,
                not self._stage.head and layers.stop == len(kinds),
            )
            steps.append(_Step(layers, again, leaving, returns, same))
        return steps[::-1]

    def _begin_forward(self, trace: StageTrace) -> None:
        """The input is embedded, or has been received."""
        if not self._stage.embedding:
            trace.free(COMMUNICATION, self._ends.residual)
            trace.take(RESIDUAL, self._ends.residual)
        trace.take(ATTENTION, self._ends.rotary)
        if self._stage.embedding:
            with trace.doing("embedding"):
                trace.replay(self._ends.embedding)

    def _forward_step(self, trace: StageTrace, step: _Step) -> None:
        """Layers that backward recomputes as one keep only their input and their output."""
        self._leave(trace, step.leaves)
        for place in step.places:
            with trace.doing(self._name(place)), self._with_weights(trace, range(place, place + 1)):
                trace.replay(self._layers[place].forward)
            if step.again:
                trace.replay(self._layers[place].forget)
        if step.again:
            trace.free(RESIDUAL, self._ends.residual * (len(step.places) - 1))

    def _end_forward(self, trace: StageTrace) -> None:
        """The loss is computed, or the output is about to be sent."""
        if self._stage.head:
            with trace.doing("head"):
                trace.replay(self._ends.head)
        else:
            trace.free(RESIDUAL, self._ends.residual)
            trace.take(COMMUNICATION, self._ends.residual)

    def _backward_step(self, trace: StageTrace, step: _Step) -> None:
        """Layers that are recomputed as one run forward again before their backward."""
        with self._with_weights(trace, step.places, again=step.again):
            self._return(trace, step.returns)
            if step.again:
                for place in step.places:
                    with trace.doing(f"{self._name(place)} again"):
                        trace.replay(self._layers[place].again[place == step.places[-1]])
                trace.free(RESIDUAL, self._ends.residual)  # the second run ends before its output
            for place in reversed(step.places):
                # A layer alone holds the gradient of its output, unless another stage has sent it.
                owned = self._stage.head or place != len(self._layers) - 1
                with trace.doing(self._name(place)):
                    trace.replay(self._layers[place].backward[owned])

    def _end_backward(self, trace: StageTrace) -> None:
        """The embedding's backward runs, or the gradient of the input is about to be sent."""
        if self._stage.embedding:
            with trace.doing("embedding"):
                trace.replay(self._ends.embedding_backward)
        else:
            trace.use(COMMUNICATION, self._held_input)
            trace.free(BACKWARD, self._ends.residual)
            trace.take(COMMUNICATION, self._ends.residual)
        if not self._stage.head:
            trace.free(COMMUNICATION, self._ends.residual)  # the gradient that was received

    def _leave(self, trace: StageTrace, places: range) -> None:
        """The groups of these places leave the device."""
        for place in places:
            for kind, size in self.moves.away[place].items():
                trace.free(kind, size)
            if place == 0:
                trace.take(RESIDUAL, self.moves.held)

    def _return(self, trace: StageTrace, places: range) -> None:
        """The groups of these places return to the device."""
        for place in places:
            for kind, size in self.moves.away[place].items():
                trace.take(kind, size)

    def _name(self, place: int) -> str:
        return f"layer {self._stage.layers[place]}"

    def _with_weights(self, trace: StageTrace, places: range, *, again: bool = False) -> AbstractContextManager[None]:
        """The offloaded weights of these layers are on the device during the body."""
        if not self._offloaded.sizes:
            return nullcontext()
        fetched = self._offloaded.fetched([self._stage.layers[place] for place in places], again=again)
        return _taken(trace, fetched)


@contextmanager
def _taken(trace: StageTrace, nbytes: int) -> Iterator[None]:
    """So many bytes are in use during the body."""
    trace.take(COMMUNICATION, nbytes)
    yield
    trace.free(COMMUNICATION, nbytes)
