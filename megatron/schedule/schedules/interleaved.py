"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.2): v chunks of layers per rank."""

from __future__ import annotations

from megatron.schedule.schedule import Action, Kind
from megatron.schedule.schedules.one_f_one_b import in_turn
from megatron.schedule.spec import Formula, Lists, ScheduleSizes, ScheduleSpec, Times


def interleaved(sizes: ScheduleSizes) -> Lists:
    """Has a smaller bubble than 1F1B, for v times the transfers and more saved activations.

    Microbatches run in groups: a rank takes all of a group through its first chunk, then through its second, and so on,
    and back in the opposite order. The group is Megatron-LM's --microbatch-group-size-per-virtual-pipeline-stage,
    default p; a larger one leaves a transfer more time and keeps more activations. Rank r keeps at most (v - 1) G + 2
    (p - r - 1) + 1 chunks' activations, with G the largest group of `group_sizes`.

    With v = 1 this is 1F1B.
    """
    p, v = sizes.p, sizes.v
    groups = group_sizes(p, sizes.m, sizes.group)
    step = 2 if v > 1 else 1  # the warm-up has to cover the way there and back of a chunk in the middle
    ranks = []
    for rank in range(p):
        forwards: list[Action] = []
        backwards: list[Action] = []
        start = 0
        for size in groups:
            chunks = [(chunk * p + rank, k) for chunk in range(v) for k in range(start, start + size)]
            forwards += (Action(Kind.FORWARD, stage, k) for stage, k in chunks)
            back = [(chunk * p + rank, k) for chunk in reversed(range(v)) for k in range(start, start + size)]
            backwards += (Action(Kind.BACKWARD, stage, k) for stage, k in back)
            start += size
        warm_up = (v - 1) * max(groups) + step * (p - rank - 1)
        ranks.append(in_turn(forwards, backwards, warm_up))
    return tuple(ranks)


def group_sizes(p: int, m: int, group: int) -> list[int]:
    """Divides m microbatches into groups with at least p members, unless there are fewer microbatches.

    These are groups of `group` with the rest at the end, if that is zero or at least p, which Megatron-LM accepts. A
    smaller rest would leave ranks idle, or deadlocked. Then the microbatches are distributed evenly instead, over the
    largest number of groups with p members each: up to p - 1 more than `group` in one, and fewer with more groups.
    `group` is p or more: ScheduleSpec.sizes refuses others.
    """
    full, remainder = divmod(m, group)
    if remainder == 0 or remainder >= p:
        return [group] * full + ([remainder] if remainder else [])
    count = max(1, min(full + 1, m // p))
    return [m // count + (number < m % count) for number in range(count)]


def bubble(sizes: ScheduleSizes, times: Times) -> Formula | None:
    """The bubble of 1F1B, but the pipeline fills in steps of a chunk; for m >= p."""
    p, v, m = sizes.p, sizes.v, sizes.m
    return Formula("(p - 1) / (v m + p - 1)", (p - 1) / (v * m + p - 1)) if m >= p else None


INTERLEAVED = ScheduleSpec(
    name="interleaved", actions=interleaved, bubble=bubble, virtual_stages=None, takes_groups=True
)
