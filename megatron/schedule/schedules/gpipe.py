"""GPipe (Huang et al., arXiv 1811.06965): every forward, then every backward."""

from __future__ import annotations

from megatron.schedule.schedule import Action, Kind
from megatron.schedule.schedules.one_f_one_b import fill_and_drain
from megatron.schedule.spec import Lists, ScheduleSizes, ScheduleSpec


def gpipe(sizes: ScheduleSizes) -> Lists:
    """Keeps all m microbatches' activations at once; the time is 1F1B's.

    The paper runs the backwards in reverse order. Here they run in order, so that gradients are summed in the same
    order, and to the same bits, as under the other schedules.
    """
    ranks = []
    for rank in range(sizes.p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(sizes.m)]
        ranks.append((*forwards, *(Action(Kind.BACKWARD, rank, k) for k in range(sizes.m))))
    return tuple(ranks)


GPIPE = ScheduleSpec(name="gpipe", actions=gpipe, bubble=fill_and_drain, has_pairs=False)
