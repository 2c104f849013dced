"""ZB-H1 of Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241, section 2.1)."""

from __future__ import annotations

from megatron.schedule.schedule import Action, Kind, Schedule, round_robin
from megatron.schedule.schedules.one_f_one_b import in_turn
from megatron.schedule.schedules.weight_grads import with_weight_grads


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with a split backward: the stage before waits for the input's gradient only; the weights' fills idle time.

    Idle for (p - 1)(F + I - W) a rank instead of (p - 1)(F + I + W), if W is no longer than F and I: a third when all
    are equal. Every rank keeps up to p microbatches between forward and weight gradient, as 1F1B's first rank does.
    """
    ranks = []
    for rank in range(p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(m)]
        input_grads = [Action(Kind.INPUT_GRAD, rank, k) for k in range(m)]
        ranks.append(in_turn(forwards, input_grads, warm_up=p - rank - 1))
    return Schedule("zb-h1", round_robin(p), m, with_weight_grads(ranks, p - 1, most_kept=p))
