"""Activations that wait far away: what offload frees on the device, as a step is played.

With --pipeline-offload-ratio the schedule moves groups, (stage, microbatch): `ratio` of a group is gone when the
computation beside which it left is over, and is back from the computation before its backward on. Groups that it leaves
alone, and all of them with the other two ways, move layer by layer within their forward and backward, whose profiles have
it (layer_moves.py). With ratio auto nothing moves at first, and nothing is planned to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.planner.memory.stage import StageMemory
from megatron.planner.sizes import ACTIVATIONS
from megatron.planner.tally import Profile, Tally
from megatron.schedule.offload_pass import moved_groups, with_offload
from megatron.schedule.schedule import GRADIENTS_OF_INPUT, Action, Kind, Schedule

Group = tuple[int, int]


@dataclass(frozen=True)
class Far:
    """groups: what the schedule moves, and `ratio` of it."""

    groups: frozenset[Group]
    ratio: float


def with_moves(run: RunConfig, schedule: Schedule) -> Schedule:
    """The schedule with the moves of activations that the flags ask for."""
    offload = run.activation_offload
    return with_offload(schedule) if offload.kind == "ratio" and offload.ratio else schedule


def far_of(run: RunConfig, schedule: Schedule, rank: int) -> Far:
    """What the schedule moves on one rank. `schedule`: with its moves."""
    offload = run.activation_offload
    return Far(moved_groups(schedule.actions[rank]), offload.ratio or 0.0 if offload.kind == "ratio" else 0.0)


class FarTally:
    """Takes and frees what the schedule moves, beside a rank's list of actions. most: bytes that were far away at once.

    whole, by_layer: profiles of stages, of groups that the schedule moves and of the others.
    """

    def __init__(
        self, tally: Tally, far: Far, whole: Mapping[int, StageMemory], by_layer: Mapping[int, StageMemory]
    ) -> None:
        self._tally, self._far, self._whole, self._by_layer = tally, far, whole, by_layer
        self._leaving: list[Group] = []  # since before the computation that comes next or runs
        self._now = self.most = 0

    def profile(self, action: Action) -> Profile:
        """Of a computation."""
        group = (action.stage, action.microbatch)
        return (self._whole if group in self._far.groups else self._by_layer)[action.stage].of(action.kind)

    def move(self, action: Action) -> None:
        """An OFFLOAD or a RELOAD."""
        group = (action.stage, action.microbatch)
        if action.kind is Kind.OFFLOAD:
            self._leaving.append(group)
        else:
            self._play(group, back=True)

    def after(self, action: Action) -> None:
        """A computation is over."""
        for gone in self._leaving:
            self._play(gone, back=False)
        self._leaving.clear()
        if (action.stage, action.microbatch) in self._far.groups:
            return
        if action.kind is Kind.FORWARD:
            self._count(self._by_layer[action.stage].away)
        elif action.kind in GRADIENTS_OF_INPUT:
            self._count(-self._by_layer[action.stage].away)

    def _play(self, group: Group, *, back: bool) -> None:
        net = self._whole[group[0]].forward.net
        sign = 1 if back else -1
        moved = {kind: sign * int(self._far.ratio * net.get(kind, 0)) for kind in ACTIVATIONS}
        self._count(-sum(moved.values()))
        self._tally.play(Profile(moved, moved if back else {}, "activations that are back"))

    def _count(self, left: int) -> None:
        self._now += left
        self.most = max(self.most, self._now)
