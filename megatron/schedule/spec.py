"""The interface of a pipeline schedule for the rest of the code: its construction and its guarantees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron.base.errors import ConfigError
from megatron.schedule.schedule import Action, Placement, Schedule, round_robin
from megatron.schedule.turns_pass import in_pairs

Lists = tuple[tuple[Action, ...], ...]  # the actions of each rank


class ScheduleSizes(NamedTuple):
    """p ranks with v virtual stages each run m microbatches. `group`: the size of a group of microbatches of
    `interleaved`. `pairs`: backwards run together with forwards of other microbatches (turns_pass.py). A pair takes as
    long as both and sends its results when it ends, so a microbatch needs two pairs of time for a rank's way there and
    back, and warm-up is twice as long.
    """

    p: int
    v: int
    m: int
    group: int
    pairs: bool = False

    def warm_up(self, rank: int) -> int:
        """Returns the forwards of a rank before its first backward returns, on the way of a microbatch from this rank
        to the last one and back."""
        ranks_behind = self.p - rank - 1
        return 2 * ranks_behind if self.pairs else ranks_behind


class Times(NamedTuple):
    """Seconds of a microbatch in a rank's layers."""

    forward: float
    input_grad: float
    weight_grad: float


class Formula(NamedTuple):
    """The bubble's fraction of a step, as text and as a number."""

    text: str
    value: float


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """A schedule as data. Flags, planner and engine read these fields; nothing else depends on the chosen schedule.

    `name` is its name on the command line. `actions` returns the computations of each rank, in order. `bubble` returns
    the published fraction of a step in which ranks are idle, if all stages take equally long and communication costs
    nothing; None for sizes and times to which the formula does not apply. `placement` is for p ranks and v virtual
    stages per rank. `virtual_stages` is the number that the schedule needs per rank; None if the user chooses, 2 or
    more. `splits_backward` means that gradients of inputs and of weights are computed at different times.
    `takes_groups` means that `ScheduleSizes.group` matters. `has_pairs` means that backwards can run together with
    forwards.
    """

    name: str
    actions: Callable[[ScheduleSizes], Lists]
    bubble: Callable[[ScheduleSizes, Times], Formula | None]
    placement: Callable[[int, int], Placement] = round_robin
    virtual_stages: int | None = 1
    splits_backward: bool = False
    takes_groups: bool = False
    has_pairs: bool = True

    def sizes(
        self, p: int, m: int, v: int | None = None, group: int | None = None, *, pairs: bool = False
    ) -> ScheduleSizes:
        """Returns the sizes with their defaults: the virtual stages that the schedule needs, and groups of p.

        Raises ConfigError if `v` or `group` does not fit the schedule.
        """
        if group is not None and not self.takes_groups:
            raise ConfigError(
                f"--microbatch-group-size-per-virtual-pipeline-stage has no effect under schedule {self.name}; "
                "remove it"
            )
        if group is not None and group < p:
            raise ConfigError(
                f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below "
                f"--pipeline-model-parallel-size {p}; give {p} or more"
            )
        return ScheduleSizes(p, self.virtual_stages_for(v), m, p if group is None else group, pairs)

    def virtual_stages_for(self, requested: int | None) -> int:
        """Returns the virtual stages per rank: `requested`, or without it the number that the schedule needs.

        Raises ConfigError if the two contradict each other.
        """
        needed = self.virtual_stages
        if needed is None:
            if requested is None or requested < 2:
                raise ConfigError(
                    f"schedule {self.name} needs 2 or more virtual stages per rank; give them, or take another schedule"
                )
            return requested
        if requested not in (None, needed):
            raise ConfigError(
                f"schedule {self.name} has {needed} virtual stage{'s' if needed > 1 else ''} per rank, not "
                f"{requested}; leave out their number, or take a schedule that has as many"
            )
        return needed

    def build(self, p: int, m: int, *, v: int | None = None, group: int | None = None, pairs: bool = False) -> Schedule:
        """Returns a training step's computations. See `sizes` for the arguments and for the causes of a ConfigError."""
        return self.schedule(self.sizes(p, m, v, group, pairs=pairs))

    def schedule(self, sizes: ScheduleSizes) -> Schedule:
        """Returns a training step's computations."""
        schedule = Schedule(self.name, self.placement(sizes.p, sizes.v), sizes.m, self.actions(sizes))
        return in_pairs(schedule) if sizes.pairs else schedule
