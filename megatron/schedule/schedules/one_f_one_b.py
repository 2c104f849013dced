"""1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1; first in PipeDream-Flush, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.schedule.schedule import Action, Kind, Schedule, round_robin


def one_f_one_b(p: int, m: int) -> Schedule:
    """Warm-up forwards until a backward can come back, then one forward and one backward in turn.

    Rank r keeps at most p - r microbatches' activations. Bubble (p - 1) / (m + p - 1) of the step.
    """
    ranks = []
    for rank in range(p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(m)]
        backwards = [Action(Kind.BACKWARD, rank, k) for k in range(m)]
        ranks.append(in_turn(forwards, backwards, warm_up=p - rank - 1))
    return Schedule("1f1b", round_robin(p), m, tuple(ranks))


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    actions = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - warm_up :])
