"""The moments of a schedule at which a rank's memory can be largest, whatever a microbatch takes in its stages.

At any moment of a rank's list of actions its memory is linear in a few sizes: what a forward leaves behind, what the first
half of a split backward leaves, what is offloaded, a message, and what the running computation takes in addition. The
coefficients are counts that the schedule alone decides. Only those moments matter that no other one exceeds in every count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.schedule.offload_pass import APART
from megatron.schedule.schedule import GRADIENTS_OF_INPUT, Kind, Schedule
from megatron.schedule.schedules.gpipe import GPIPE
from megatron.schedule.schedules.interleaved import group_sizes
from megatron.schedule.spec import ScheduleSizes, ScheduleSpec

MomentCounts = NDArray[np.int64]

# The counts of a class of stages: of groups of activations that stay or move layer by layer, and after these, if the
# schedule moves activations, of those that it moves, with minus the number of them that are away from the device.
# KEPT: microbatches between their forward and their backward of inputs. DEFERRED: between the halves of their backward.
# FORWARD, BACKWARD: 1 if such a computation is running.
KEPT, DEFERRED, FORWARD, BACKWARD = range(4)
OF_GROUPS = 4
AWAY = 2 * OF_GROUPS
MESSAGES, REDUCTION = -2, -1  # the last counts: messages that exist; 1 in the last computation of a stage


def counts_per_class(*, offload: bool) -> int:
    """Returns the number of counts of a class of stages."""
    return AWAY + 1 if offload else OF_GROUPS


def enough_microbatches(spec: ScheduleSpec, sizes: ScheduleSizes) -> ScheduleSizes:
    """Returns sizes with fewer microbatches, or the same, in which all ranks have the same most memory in use.

    A full pipeline repeats itself. GPipe keeps all microbatches.
    """
    return sizes if spec is GPIPE else _few_microbatches(spec, sizes)


def _few_microbatches(spec: ScheduleSpec, sizes: ScheduleSizes) -> ScheduleSizes:
    """The same; of GPipe, whose memory grows evenly with every microbatch more, so many that this holds."""
    p, v, m, group = sizes
    rest, unit = 0, p
    if spec.takes_groups and v > 1:
        groups = group_sizes(p, m, group)
        if groups[:-1] != [group] * (len(groups) - 1):
            return sizes  # groups of other sizes come first
        rest, unit = m % group, group
    few = -(-max(4 * unit, 2 * APART) // unit) * unit + rest
    return sizes._replace(m=min(m, few))


def moments_of(
    spec: ScheduleSpec,
    sizes: ScheduleSizes,
    ranks: Sequence[int],
    classes: Sequence[int],
    *,
    offload: bool,
    overlap: bool,
    cpu: bool,
) -> MomentCounts:
    """Returns the [moments, counts] of several ranks together.

    classes: of the stages of each of these ranks, in order, numbered from 0. offload: the schedule moves activations.
    overlap: messages are overlapped with computations. cpu: a sent message is freed at once, and not when the next leaves.
    The first counts are those of class 0, then come those of class 1, ..., and then MESSAGES and REDUCTION.
    """
    few = _few_microbatches(spec, sizes)
    found = functools.partial(
        _moments_of, spec, ranks=tuple(ranks), classes=tuple(classes), offload=offload, overlap=overlap, cpu=cpu
    )
    counts = found(few)
    if few.m < sizes.m and spec is GPIPE:
        return counts + (sizes.m - few.m) * (found(few._replace(m=few.m + 1)) - counts)
    return counts


@functools.lru_cache(maxsize=4096)
def _moments_of(
    spec: ScheduleSpec,
    sizes: ScheduleSizes,
    *,
    ranks: tuple[int, ...],
    classes: tuple[int, ...],
    offload: bool,
    overlap: bool,
    cpu: bool,
) -> MomentCounts:
    schedule = _computations(spec, sizes)
    of_ranks = [_moments(schedule, rank, classes, offload=offload, overlap=overlap, cpu=cpu) for rank in ranks]
    return _largest(np.concatenate(of_ranks), counts_per_class(offload=offload))


@functools.lru_cache(maxsize=4)
def _computations(spec: ScheduleSpec, sizes: ScheduleSizes) -> Schedule:
    return Schedule(spec.name, spec.placement(sizes.p, sizes.v), sizes.m, spec.actions(sizes))


def _moments(
    schedule: Schedule, rank: int, classes: Sequence[int], *, offload: bool, overlap: bool, cpu: bool
) -> MomentCounts:
    """The counts in each computation of one rank."""
    actions, stages = schedule.actions[rank], schedule.placement.stages_of(rank)
    chunk = {stage: number for number, stage in enumerate(stages)}
    n, per_class = len(actions), counts_per_class(offload=offload)
    width = per_class * (max(classes) + 1) + 2
    change = np.zeros((n + 1, width), np.int64)  # before each computation
    now = np.zeros((n, width), np.int64)  # only in it
    first = [per_class * classes[chunk[action.stage]] for action in actions]
    forward_at = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind is Kind.FORWARD}
    moved = set()
    sent = 0
    for place, action in enumerate(actions):
        if offload and action.kind in GRADIENTS_OF_INPUT:
            start = forward_at[action.stage, action.microbatch]
            if place - start >= APART:
                moved.add((action.stage, action.microbatch))
                change[start + 2, first[place] + AWAY] -= 1
                change[place - 1, first[place] + AWAY] += 1
    last = {action.stage: place for place, action in enumerate(actions)}
    for place, action in enumerate(actions):
        turned = (action.stage + 1 < schedule.placement.num_stages) - (action.stage > 0)  # messages made of messages
        base = first[place] + (OF_GROUPS if (action.stage, action.microbatch) in moved else 0)
        after = change[place + 1]
        if action.kind is Kind.FORWARD:
            now[place, base + FORWARD] = 1
            after[base + KEPT] += 1
            after[MESSAGES] += turned
        elif action.kind is Kind.WEIGHT_GRAD:
            after[base + DEFERRED] -= 1
        else:
            now[place, base + BACKWARD] = 1
            after[base + KEPT] -= 1
            after[base + DEFERRED] += action.kind is Kind.INPUT_GRAD
            after[MESSAGES] -= turned
        now[place, REDUCTION] = last[action.stage] == place
        if schedule.receive_before(action) is not None:
            change[max(place - 1, 0) if overlap else place, MESSAGES] += 1
        if schedule.send_after(action) is not None:
            after[MESSAGES] -= cpu or sent > 0  # the one that was sent before
            sent += 1
    return now + np.cumsum(change[:-1], axis=0)


def _largest(counts: MomentCounts, per_class: int) -> MomentCounts:
    """Returns those that no other one exceeds in every count, in a fixed order.

    Of the groups that the schedule moves, compared are those on the device and those that are away: both take memory.
    """
    counts = np.unique(counts, axis=0)
    compared = counts.copy()
    if per_class > AWAY:
        compared[:, OF_GROUPS + KEPT : MESSAGES : per_class] += counts[:, AWAY:MESSAGES:per_class]
        compared[:, AWAY:MESSAGES:per_class] *= -1
    reaches = np.ones(
        (len(counts), len(counts)), dtype=np.bool_
    )  # whether a row is no less than another in every count
    for column in compared.T:
        reaches &= column[:, None] >= column
    return counts[reaches.sum(axis=0) == 1]
