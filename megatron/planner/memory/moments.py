"""The moments of a schedule at which a rank's memory can be largest, whatever a microbatch takes in its stages.

At any moment of a rank's list of actions its memory is linear in a few sizes: what a forward leaves behind, what the
first half of a split backward leaves, what is offloaded, a message, and what the running computation takes in addition.
The coefficients are counts that the schedule alone decides. Only those moments matter that no other one exceeds in
every count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.computations import Computations, computations_of
from megatron.schedule.offload_pass import APART
from megatron.schedule.schedule import COMPUTE, RECEIVES, SENDS, Action
from megatron.schedule.schedules.gpipe import GPIPE
from megatron.schedule.schedules.interleaved import group_sizes
from megatron.schedule.spec import ScheduleSizes, ScheduleSpec

MomentCounts = NDArray[np.int64]
_BLOCK = 64  # moments that are compared with each other
_LARGEST_KEY = 2**62

# The counts of a class of stages: of groups of activations that stay or move layer by layer, and after these, if the
# schedule moves activations, of those that it moves, with minus the number of them that are away from the device.
# KEPT: microbatches between their forward and their backward of inputs. DEFERRED: between the halves of their backward.
# The others are 1 while such a computation runs. LAST_OF_STAGE: the last one of a stage, in which reductions may begin.
KEPT, DEFERRED, FORWARD, BACKWARD, WEIGHT_GRAD, LAST_OF_STAGE = range(6)
OF_GROUPS = 6
AWAY = 2 * OF_GROUPS
MESSAGES = -1  # the last count: messages that exist


@dataclass(frozen=True)
class Messages:
    """The places in a rank's list of computations before which its receives are posted, and its sends leave."""

    received: NDArray[np.int64]
    sent: NDArray[np.int64]

    @classmethod
    def listed(cls, actions: Sequence[Action]) -> Messages:
        """Returns those of a rank's list with transfers."""
        places = np.cumsum([action.kind in COMPUTE for action in actions])
        kinds = [action.kind for action in actions]
        received, sent = (places[np.array([kind in some for kind in kinds])] for some in (RECEIVES, SENDS))
        return cls(received, sent)


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
    p, v, m, group, _ = sizes
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
    overlap: messages are overlapped with computations. cpu: a sent message is freed at once, and not when the next
    leaves. The first counts are those of class 0, then come those of class 1, ..., and then MESSAGES.
    """
    few = _few_microbatches(spec, sizes)
    of_sizes = functools.partial(
        _moments_of, spec, ranks=tuple(ranks), classes=tuple(classes), offload=offload, overlap=overlap, cpu=cpu
    )
    counts = of_sizes(few)
    if few.m < sizes.m and spec is GPIPE:
        return counts + (sizes.m - few.m) * (of_sizes(few._replace(m=few.m + 1)) - counts)
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
    rank_of, lists = computations_of(spec, sizes)
    of_ranks = [
        rank_moments(
            rank_of,
            rank,
            lists[rank],
            classes,
            messages_of(rank_of, rank, lists, overlap=overlap),
            offload=offload,
            cpu=cpu,
        )
        for rank in ranks
    ]
    return _largest(np.concatenate(of_ranks), counts_per_class(offload=offload))


def rank_moments(
    rank_of: NDArray[np.int64],
    rank: int,
    computations: Computations,
    classes: Sequence[int],
    messages: Messages,
    *,
    offload: bool,
    cpu: bool,
) -> MomentCounts:
    """Returns the [computations, counts] in each computation of one rank. Arguments as for `moments_of`."""
    forward, input_grad, stage = computations.forward, computations.input_grad, computations.stage
    place, per_class = np.arange(len(stage)), counts_per_class(offload=offload)
    width = per_class * (max(classes) + 1) + 1
    change = np.zeros((len(stage) + 1, width), np.int64)  # before each computation
    now = np.zeros((len(stage), width), np.int64)  # only in it
    held = np.flatnonzero(rank_of == rank)
    chunk = np.searchsorted(held, stage)
    first = per_class * np.array(classes)[chunk]
    base = first.copy()
    if offload:
        forward_at = np.zeros((len(held), int(computations.microbatch.max()) + 1), np.int64)
        forward_at[chunk[forward], computations.microbatch[forward]] = place[forward]
        begun = forward_at[chunk, computations.microbatch]
        moves = input_grad & (place - begun >= APART)
        moved = np.zeros(forward_at.shape, np.bool_)
        moved[chunk[moves], computations.microbatch[moves]] = True
        base += OF_GROUPS * moved[chunk, computations.microbatch]
        np.add.at(change, (begun[moves] + 2, first[moves] + AWAY), -1)
        np.add.at(change, (place[moves] - 1, first[moves] + AWAY), 1)
    running = np.select([forward, input_grad], [FORWARD, BACKWARD], WEIGHT_GRAD)
    running[[np.flatnonzero(chunk == number)[-1] for number in range(len(held))]] = LAST_OF_STAGE
    now[place, base + running] = 1
    for which, count, sign in (
        (forward, KEPT, 1),
        (input_grad, KEPT, -1),
        (computations.first_half, DEFERRED, 1),
        (computations.second_half, DEFERRED, -1),
    ):
        change[place[which] + 1, base[which] + count] += sign
    # Messages are made of messages.
    ends = (stage + 1 < len(rank_of)).astype(np.int64) - (stage > 0)
    change[1:, MESSAGES] += (forward.astype(np.int64) - input_grad) * ends
    np.add.at(change[:, MESSAGES], messages.received, 1)
    np.add.at(change[:, MESSAGES], messages.sent if cpu else messages.sent[1:], -1)  # the one that was sent before
    return now + np.cumsum(change[:-1], axis=0)


def messages_of(rank_of: NDArray[np.int64], rank: int, lists: Sequence[Computations], *, overlap: bool) -> Messages:
    """Returns the messages of a rank. lists: the computations of all ranks.

    They are those of schedule/passes.py if transfers are overlapped with computations, and no computations run together;
    else a receive may be posted later than in a run, and a message may leave earlier.
    """
    computations = lists[rank]
    forward, input_grad, stage = computations.forward, computations.input_grad, computations.stage
    to_next = (stage + 1 < len(rank_of)) & (rank_of[np.minimum(stage + 1, len(rank_of) - 1)] != rank)
    to_last = (stage > 0) & (rank_of[np.maximum(stage - 1, 0)] != rank)
    needed = np.flatnonzero((forward & to_last) | (input_grad & to_next))
    sent = np.flatnonzero((forward & to_next) | (input_grad & to_last)) + 1
    if not overlap:
        return Messages(needed, sent)
    senders = rank_of[np.where(forward, stage - 1, stage + 1)[needed]]
    posted = [_posted(computations, needed[senders == sender], lists[sender]) for sender in np.unique(senders)]
    return Messages(np.concatenate([needed[:0], *posted]), sent)


def _posted(computations: Computations, needed: NDArray[np.int64], sender: Computations) -> NDArray[np.int64]:
    """The places before which a rank posts the receives of one sender, with overlap: each one computation before the
    one that needs it, and no later than those that the sender sends after it (schedule/passes.py).

    needed: places of the computations that need the messages.
    """
    of_sender = {
        (bool(forward), int(stage), int(microbatch)): place
        for place, (forward, stage, microbatch) in enumerate(
            zip(sender.forward, sender.stage, sender.microbatch, strict=True)
        )
        if forward or sender.input_grad[place]
    }
    forward, stage = computations.forward[needed], computations.stage[needed]
    sent = [
        of_sender[bool(is_forward), int(number - 1 if is_forward else number + 1), int(microbatch)]
        for is_forward, number, microbatch in zip(forward, stage, computations.microbatch[needed], strict=True)
    ]
    latest = np.maximum(needed[np.argsort(sent)] - 1, 0)
    return np.minimum.accumulate(latest[::-1])[::-1]


def _largest(counts: MomentCounts, per_class: int) -> MomentCounts:
    """Returns those that no other one exceeds in every count, in a fixed order.

    Of the groups that the schedule moves, compared are those on the device and those that are away: both take memory.
    """
    counts = _distinct(counts)
    compared = counts.copy()
    if per_class > AWAY:
        compared[:, OF_GROUPS + KEPT : MESSAGES : per_class] += counts[:, AWAY:MESSAGES:per_class]
        compared[:, AWAY:MESSAGES:per_class] *= -1
    # A row that exceeds another one has a larger sum, so it is among those that were kept, or in the same block.
    order = np.argsort(-compared.sum(axis=1), kind="stable")
    kept = order[:0]
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        block = block[_reached(compared[block], compared[kept]) == 0]
        kept = np.concatenate([kept, block[_reached(compared[block], compared[block]) == 1]])
    return counts[np.sort(kept)]


def _distinct(rows: MomentCounts) -> MomentCounts:
    """Returns the distinct rows in rising order."""
    key, size = np.zeros(len(rows), np.int64), 1
    for column in (rows - rows.min(axis=0)).T:
        values = int(column.max()) + 1
        if size * values > _LARGEST_KEY:
            distinct, key = np.unique(key, return_inverse=True)
            size = len(distinct)
        key, size = key * values + column, size * values
    return rows[np.unique(key, return_index=True)[1]]


def _reached(rows: MomentCounts, others: MomentCounts) -> MomentCounts:
    """Returns of each row how many of the others are no less in every count."""
    reaches = np.ones((len(others), len(rows)), np.bool_)
    for row, other in zip(rows.T, others.T, strict=True):
        reaches &= other[:, None] >= row
    return reaches.sum(axis=0)
