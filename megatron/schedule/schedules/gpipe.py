"""GPipe (Huang et al., arXiv 1811.06965): every forward, then every backward."""

from __future__ import annotations

from megatron.schedule.schedule import Action, Kind, Schedule, round_robin


def gpipe(p: int, m: int) -> Schedule:
    """All m microbatches' activations are alive at once; the time is 1F1B's.

    The paper runs the backwards last first. Here they run in order, so that gradients add up in the same order, and to
    the same bits, as under the other schedules.
    """
    ranks = []
    for rank in range(p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(m)]
        ranks.append((*forwards, *(Action(Kind.BACKWARD, rank, k) for k in range(m))))
    return Schedule("gpipe", round_robin(p), m, tuple(ranks))
