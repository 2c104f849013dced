"""ZB-V: Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241, section 6; V-ZB in arXiv 2405.15362)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.schedule.schedule import Action, Kind, v_shape
from megatron.schedule.schedules.weight_grads import with_weight_grads
from megatron.schedule.spec import Formula, Lists, ScheduleSizes, ScheduleSpec, Times


def zb_v(sizes: ScheduleSizes) -> Lists:
    """Two chunks per rank, placed down the ranks and back up, and a split backward.

    With F = I = W and m >= 2p - 1 no rank is idle between its first and its last action. With m >= p the step ends as
    early as possible: when the last rank, which begins p - 1 chunks late, has finished. A rank keeps at most 2p chunks'
    activations between forward and weight gradient: p microbatches of its layers, as 1F1B's first rank does.
    """
    p, m = sizes.p, sizes.m
    played = max(m, 2 * p - 1)  # a shorter step is a longer one without the missing microbatches
    ranks = [[a for a in _forwards_and_input_grads(p, rank, played) if a.microbatch < m] for rank in range(p)]
    return with_weight_grads(ranks, 2 * p - 1, max_held=2 * p)


def _forwards_and_input_grads(p: int, rank: int, m: int) -> Iterator[Action]:
    """The order of a rank, for m >= 2p - 1.

    In units of F = I = W, rank r can receive the first microbatch at time r, on its way up at 2p - 1 - r, and the
    loss's gradient at 2p + r. The first two rows have as many actions as there are units until then; the third lasts,
    with weight gradients, until the gradient has returned from its turn on the last rank. Then six actions repeat.
    """
    chunks = (rank, 2 * p - 1 - rank)
    forward_down, forward_up = (iter([Action(Kind.FORWARD, stage, k) for k in range(m)]) for stage in chunks)
    back_down, back_up = (iter([Action(Kind.INPUT_GRAD, stage, k) for k in range(m)]) for stage in chunks)
    order = [forward_down] * (2 * (p - rank) - 1)
    order += [forward_up, forward_down] * rank
    order += [forward_up, back_up] * (p - rank)
    order += [forward_down, back_down, forward_up, back_up] * (m - p)  # the forwards down end first
    order += [back_down, back_up] * rank
    order += [back_down] * (p - rank)
    for actions in order:
        yield from itertools.islice(actions, 1)


def bubble(sizes: ScheduleSizes, times: Times) -> Formula | None:
    """The only idle time is until the last rank can begin: p - 1 chunks. For F = I = W and m >= 2p - 1."""
    p, m = sizes.p, sizes.m
    if len(set(times)) > 1 or m < 2 * p - 1:
        return None
    return Formula("(p - 1) / (6 m + p - 1), 0 inside a rank", (p - 1) / (6 * m + p - 1))


ZB_V = ScheduleSpec(name="zb-v", actions=zb_v, bubble=bubble, placement=v_shape, virtual_stages=2, splits_backward=True)
