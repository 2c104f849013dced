"""Activations that wait far away: what offload frees on the device, as a step is played.

With --pipeline-offload-ratio the schedule moves groups, (stage, microbatch): `ratio` of a group is gone when the
computation beside which it left is over, and is back from the computation before its backward on. Groups that it leaves
alone, and all of them with the other two ways, move layer by layer: what does is gone at the end of the forward, and comes
back within the backward as other layers are freed. So a peak within that backward is planned without it. With ratio auto
nothing moves at first, and nothing is planned to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.offload_pass import moved_groups, with_offload
from megatron.core.pipeline_parallel.partition import Stage
from megatron.core.pipeline_parallel.schedule import GRADIENTS_OF_INPUT, Action, Kind, Schedule
from megatron.planner.activation_offload import NEAR_LAYERS, share_by_layer
from megatron.planner.activations import layer_bytes
from megatron.planner.sizes import ACTIVATIONS, Sizes, place_of
from megatron.planner.stage_memory import StageMemory
from megatron.planner.tally import Profile, Tally

Group = tuple[int, int]


@dataclass(frozen=True)
class Far:
    """groups: what the schedule moves, and `ratio` of it; by_layer: of each stage, the share of another group that moves."""

    groups: frozenset[Group]
    ratio: float
    by_layer: Mapping[int, float]


def with_moves(run: RunConfig, schedule: Schedule) -> Schedule:
    """The schedule with the moves of activations that the flags ask for."""
    offload = run.activation_offload
    return with_offload(schedule) if offload.kind == "ratio" and offload.ratio else schedule


def far_of(run: RunConfig, schedule: Schedule, rank: int, stages: tuple[Stage, ...], sizes: Sizes) -> Far:
    """What one rank moves. `schedule`: with its moves."""
    return Far(
        moved_groups(schedule.actions[rank]),
        run.activation_offload.ratio or 0.0 if run.activation_offload.kind == "ratio" else 0.0,
        {stage.number: _share_by_layer(run, len(stage.layers), sizes) for stage in stages},
    )


class FarTally:
    """Takes and frees what moves, beside a rank's list of actions. most: bytes that were far away at once."""

    def __init__(self, tally: Tally, far: Far, profiles: Mapping[int, StageMemory]) -> None:
        self._tally, self._far, self._profiles = tally, far, profiles
        self._leaving: list[Group] = []  # since before the computation that comes next or runs
        self._now = self.most = 0

    def move(self, action: Action) -> None:
        """An OFFLOAD or a RELOAD."""
        group = (action.stage, action.microbatch)
        if action.kind is Kind.OFFLOAD:
            self._leaving.append(group)
        else:
            self._play(group, self._far.ratio, back=True)

    def after(self, action: Action) -> None:
        """A computation is over."""
        group = (action.stage, action.microbatch)
        for gone in self._leaving:
            self._play(gone, self._far.ratio, back=False)
        self._leaving.clear()
        if group in self._far.groups:
            return
        share = self._far.by_layer[action.stage]
        if action.kind is Kind.FORWARD:
            self._play(group, share, back=False)
        elif action.kind in GRADIENTS_OF_INPUT:
            self._play(group, share, back=True)

    def _play(self, group: Group, share: float, *, back: bool) -> None:
        net = self._profiles[group[0]].forward.net
        sign = 1 if back else -1
        moved = {kind: sign * int(share * net.get(kind, 0)) for kind in ACTIVATIONS}
        self._now -= sum(moved.values())
        self.most = max(self.most, self._now)
        self._tally.play(Profile(moved, moved if back else {}, "activations that are back"))


def _share_by_layer(run: RunConfig, layers: int, sizes: Sizes) -> float:
    """Of a group's activations."""
    offload = run.activation_offload
    if offload.kind is None or not layers:
        return 0.0
    if offload.kind == "layers":
        return min(offload.cpu_offloading_num_layers, layers) / layers
    if offload.kind == "ratio":
        return 1.0 - share_by_layer(layers, offload.ratio or 0.0)
    parts = layer_bytes(run.model, run.recompute, place_of(run, sizes))
    moved = sum(parts[name] for name in offload.offload_modules or ())
    return moved / sum(parts.values()) * max(0, layers - NEAR_LAYERS) / layers
