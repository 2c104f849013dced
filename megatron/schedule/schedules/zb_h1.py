"""ZB-H1 of Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241, section 2.1)."""

from __future__ import annotations

from megatron.schedule.schedule import Action, Kind
from megatron.schedule.schedules.one_f_one_b import in_turn
from megatron.schedule.schedules.weight_grads import with_weight_grads
from megatron.schedule.spec import Formula, Lists, ScheduleSizes, ScheduleSpec, Times


def zb_h1(sizes: ScheduleSizes) -> Lists:
    """1F1B with a split backward: the previous stage waits only for the input's gradient; the weights' fills idle time.

    Every rank keeps up to p microbatches between forward and weight gradient, as 1F1B's first rank does; with pairs up
    to 2 p.
    """
    p, m = sizes.p, sizes.m
    ranks = []
    for rank in range(p):
        forwards = [Action(Kind.FORWARD, rank, k) for k in range(m)]
        input_grads = [Action(Kind.INPUT_GRAD, rank, k) for k in range(m)]
        ranks.append(in_turn(forwards, input_grads, sizes.warm_up(rank)))
    return with_weight_grads(ranks, p - 1, max_held=2 * p if sizes.pairs else p)


def bubble(sizes: ScheduleSizes, times: Times) -> Formula | None:
    """Each rank is idle for (p - 1)(F + I - W) instead of 1F1B's (p - 1)(F + I + W): a third if all are equal.

    For W not longer than F and I, and m >= p.
    """
    p, m = sizes.p, sizes.m
    forward, input_grad, weight_grad = times
    if m < p or weight_grad > min(forward, input_grad):
        return None
    idle = (p - 1) * (forward + input_grad - weight_grad)
    text = "(p - 1)(F + I - W) / (m (F + I + W) + (p - 1)(F + I - W))"
    return Formula(text, idle / (m * sum(times) + idle))


ZB_H1 = ScheduleSpec(name="zb-h1", actions=zb_h1, bubble=bubble, splits_backward=True)
