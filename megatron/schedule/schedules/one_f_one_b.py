"""1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1; first in PipeDream-Flush, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedule.schedule import Action, Kind
from megatron.schedule.spec import Formula, Lists, ScheduleSizes, ScheduleSpec, Times


def one_f_one_b(sizes: ScheduleSizes) -> Lists:
    """Runs warm-up forwards until a backward can return, then one forward and one backward in turn.

    Rank r keeps at most p - r microbatches' activations, and 2 (p - r) - 1 with pairs.
    """
    p, m = sizes.p, sizes.m
    ranks = []
    for rank in range(p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(m)]
        backwards = [Action(Kind.BACKWARD, rank, k) for k in range(m)]
        ranks.append(in_turn(forwards, backwards, sizes.warm_up(rank)))
    return tuple(ranks)


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Returns `warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - warm_up :])


def fill_and_drain(sizes: ScheduleSizes, times: Times) -> Formula:
    """The bubble if the pipeline fills and drains once per step, one microbatch at a time."""
    p, m = sizes.p, sizes.m
    return Formula("(p - 1) / (m + p - 1)", (p - 1) / (m + p - 1))


ONE_F_ONE_B = ScheduleSpec(name="1f1b", actions=one_f_one_b, bubble=fill_and_drain)
