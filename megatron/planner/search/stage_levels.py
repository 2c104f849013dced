"""The memory of a pipeline stage as sums of bytes: layers one after the other, alike ones by a formula.

The events are those of planner/memory/stage.py, which is exact. Where activations leave the device layer by layer the
sums here may be lower by the stage's input and by rounding; they are never higher.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.config.recompute import RecomputeConfig
from megatron.planner.memory.layer_moves import keeper
from megatron.planner.search.layer_levels import EndLevels, LayerLevels, Levels, ManyBytes

_INPUT, _EMBEDDING = -1, -2  # of a group of layers that is recomputed; next to the kinds of layers


@dataclass(frozen=True)
class StageKind:
    """What stages that need the same memory have in common. kinds: of the layers, in order."""

    kinds: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class StageLevels:
    """forward; backward, or the first half of a split one; saved: activations that a forward leaves."""

    forward: Levels
    backward: Levels
    saved: ManyBytes


@dataclass(frozen=True)
class _Group:
    """A layer, or layers that backward recomputes together (again).

    moved: what leaves the device before its forward. back: what returns before its backward. Both as kinds of layers,
    _INPUT and _EMBEDDING.
    """

    kinds: tuple[int, ...]
    again: bool
    moved: tuple[int, ...] = ()
    back: tuple[int, ...] = field(default=())


def stage_levels(
    stage: StageKind,
    layers: Sequence[LayerLevels],
    ends: EndLevels,
    recompute: RecomputeConfig,
    *,
    ratio: ManyBytes | None = None,
    keeps_last: bool = True,
    holds_input: bool = True,
) -> StageLevels:
    """Returns the levels of a stage.

    layers: by kind. ratio: of the activations that leave the device layer by layer, None if none do. keeps_last: those
    of the last layers stay. holds_input: the caller holds the stage's input until its backward ends.
    """
    size, zero = ends.residual, np.zeros_like(ends.residual)
    nothing = Levels(zero, zero)
    groups, rest = _groups(stage, recompute, moves=ratio is not None, keeps_last=keeps_last)

    def nbytes(moved: Sequence[int]) -> ManyBytes:
        total: ManyBytes = zero
        for kind in moved:
            if kind == _INPUT:
                total = total + size
            else:
                total = total + (
                    ends.embedded if kind == _EMBEDDING else layers[kind].forward.net - layers[kind].routing
                )
        return total if ratio is None else total * ratio

    def forward_of(group: _Group) -> Levels:
        start = Levels(-nbytes(group.moved), zero) if group.moved else nothing
        for kind in group.kinds:
            layer = layers[kind]
            start = start.then(layer.forward)
            if group.again:
                start = start.changed(layer.routing + size - layer.forward.net)
        return start.changed(-size * (len(group.kinds) - 1)) if group.again else start

    def backward_of(group: _Group, *, last: bool) -> Levels:
        work = nothing.changed(nbytes(group.back)) if group.back else nothing
        if group.again:
            for kind in group.kinds:
                work = work.then(layers[kind].again)
            work = work.changed(-size)
        for place, kind in enumerate(reversed(group.kinds)):
            work = work.then(layers[kind].last if last and place == 0 else layers[kind].backward)
        return work

    forward = nothing.changed(ends.rotary)
    if stage.embedding:
        forward = forward.then(ends.embedding)
    forward = _in_turn(forward, groups, forward_of)
    forward = forward.then(ends.head) if stage.head else forward
    if rest:
        forward = forward.changed(-nbytes(rest))
    if not stage.kinds:
        forward = forward.changed(-ends.rotary)
    backward = nothing
    if stage.head:
        backward = backward.then(ends.head_backward)
    elif not stage.kinds:
        backward = backward.changed(size)
    if groups:
        backward = backward.then(backward_of(groups[-1], last=not stage.head))
        backward = _in_turn(backward, groups[-2::-1], lambda group: backward_of(group, last=False))
        backward = backward.changed(-ends.rotary)
    if stage.embedding:
        backward = backward.then(ends.embedding_backward)
    elif holds_input:
        backward = backward.then(Levels(zero, size))
    received = size * (not stage.embedding)
    sent = size * (not stage.head)
    return StageLevels(forward, backward.changed(-sent), saved=forward.net + received - sent)


def _in_turn(work: Levels, groups: Sequence[_Group], levels_of: Callable[[_Group], Levels]) -> Levels:
    """`work`, and then that of each group; neighbours that are alike by a formula."""
    for group, alike in itertools.groupby(groups):
        work = work.then(levels_of(group).times(len(list(alike))))
    return work


def _groups(
    stage: StageKind, recompute: RecomputeConfig, *, moves: bool, keeps_last: bool
) -> tuple[list[_Group], tuple[int, ...]]:
    """Returns the groups, and what leaves the device only at the end of the forward (see
    planner/memory/layer_moves.py)."""
    kinds, count = stage.kinds, len(stage.kinds)
    found = [
        (tuple(layers), again)
        for part, again in recompute.groups(range(count))
        for layers in ([part] if again else [(number,) for number in part])
    ]
    if not moves:
        return [_Group(tuple(kinds[number] for number in layers), again) for layers, again in found], ()
    saved: list[list[int]] = [[] for _ in kinds]
    for layers, again in found:
        place = keeper(layers[0]) if again else layers[0]
        saved[place].append(_INPUT if again else kinds[layers[0]])
    if count and stage.embedding:
        saved[0].append(_EMBEDDING)
    if keeps_last:
        saved[max(0, count - RESIDENT_LAYERS) :] = [[]] * min(count, RESIDENT_LAYERS)

    def between(start: int, stop: int) -> tuple[int, ...]:
        return tuple(kind for each in saved[max(0, start) : max(0, stop)] for kind in each)

    groups, gone, back = [], 0, count
    for layers, again in found:
        stop = max(gone, layers[0] - 1)
        groups.append(_Group(tuple(kinds[number] for number in layers), again, between(gone, stop)))
        gone = stop
    for place, (layers, again) in reversed(list(enumerate(found))):
        start = max(0, min(back, (keeper(layers[0]) if again else layers[0]) - 1))
        groups[place] = _Group(groups[place].kinds, again, groups[place].moved, between(start, back))
        back = start
    return groups, between(gone, count)
