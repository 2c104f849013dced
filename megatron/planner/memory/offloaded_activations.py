"""Follows the device memory that the offload of activations frees, as a step is replayed.

With --pipeline-offload-ratio the schedule moves groups of activations, each of one stage and microbatch. The fraction
`ratio` of a group has left the device when the computation that its offload is overlapped with is over, and is back
from the computation before its backward on. Groups that the schedule does not move, and all groups with the other
flags, move layer by layer within their forward and backward; the profiles of these include it (layer_moves.py). With
the ratio auto nothing moves at first, so the plan moves nothing either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.planner.memory.stage import StageMemory
from megatron.schedule.offload_pass import moved_groups
from megatron.schedule.schedule import GRADIENTS_OF_INPUT, Action, Kind, Schedule
from megatron.spec.memory.trace import ACTIVATIONS, MemoryTrace, Profile

OffloadGroup = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Offloaded:
    """groups: those that the schedule moves. ratio: the fraction of their bytes that leaves the device."""

    groups: frozenset[OffloadGroup]
    ratio: float


def offloaded_by(offload: ActivationOffloadConfig, schedule: Schedule, rank: int) -> Offloaded:
    """Returns the groups that a schedule with its offload actions moves on one rank."""
    return Offloaded(moved_groups(schedule.actions[rank]), offload.ratio or 0.0 if offload.kind == "ratio" else 0.0)


class OffloadTrace:
    """Takes and frees offloaded activations in a trace, along a rank's list of actions.

    most: the most bytes of activations in host memory at once. whole, by_layer: stage -> profiles for groups that the
    schedule moves, and for groups that move layer by layer.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        offloaded: Offloaded,
        whole: Mapping[int, StageMemory],
        by_layer: Mapping[int, StageMemory],
    ) -> None:
        self._trace, self._offloaded, self._whole, self._by_layer = trace, offloaded, whole, by_layer
        # Stage -> what the two copies of a group change.
        self._gone = {stage: _moved(memory, -offloaded.ratio) for stage, memory in whole.items()}
        self._back = {stage: _moved(memory, offloaded.ratio) for stage, memory in whole.items()}
        self._leaving: list[int] = []  # stages, since before the computation that is next or runs
        self._now = self.most = 0

    def profiles(self, action: Action) -> tuple[Profile, Profile]:
        """Returns the profiles of a computation, see `StageMemory.of`."""
        group = (action.stage, action.microbatch)
        return (self._whole if group in self._offloaded.groups else self._by_layer)[action.stage].of(action.kind)

    def move(self, action: Action) -> None:
        """Call for an OFFLOAD or a RELOAD action."""
        if action.kind is Kind.OFFLOAD:
            self._leaving.append(action.stage)
        else:
            self._move(self._back[action.stage])

    def after(self, action: Action) -> None:
        """Call after a computation."""
        for stage in self._leaving:
            self._move(self._gone[stage])
        self._leaving.clear()
        if (action.stage, action.microbatch) in self._offloaded.groups:
            return
        if action.kind is Kind.FORWARD:
            self._count(self._by_layer[action.stage].offloaded)
        elif action.kind in GRADIENTS_OF_INPUT:
            self._count(-self._by_layer[action.stage].offloaded)

    def _move(self, moved: Profile) -> None:
        self._count(-moved.kept)
        self._trace.replay(moved)

    def _count(self, left: int) -> None:
        self._now += left
        self.most = max(self.most, self._now)


def _moved(memory: StageMemory, ratio: float) -> Profile:
    """What this part of a group's activations changes on the device. ratio: negative for those that leave it."""
    moved = {kind: int(ratio * memory.forward.net.get(kind, 0)) for kind in ACTIVATIONS}
    return Profile(moved, moved if ratio > 0 else {}, "activations that are back", {})
