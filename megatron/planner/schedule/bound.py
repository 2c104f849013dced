"""A lower bound of the step time of a schedule in closed form, for many costs at once.

Playing a schedule (graph.py) visits every action. The bound follows a few chains of work that have to be done one after
the other, whatever the costs are:

- A rank starts when the first microbatch has reached it. Its first gradient returns when that microbatch has been through
  all later stages, and from then on all of the rank's remaining work follows.
- After a rank's last forward, that microbatch still has to go through all later stages and back.
- After a rank's last gradient, that gradient has to go through all earlier stages.
- With one stage per rank, a rank that has b microbatches in flight waits for the gradient of one before it begins the
  b-th after it.
- Buckets of gradients are reduced behind the last backward of their stage, one after the other.

How many actions a rank runs before its first gradient and after its last forward is counted in its list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.computations import Computations, computations_of
from megatron.schedule.costs import Costs
from megatron.schedule.spec import ScheduleSpec

_Array = NDArray[np.float64]
_SETTLED = 4  # times p: microbatches from which on the beginning and the end of each list stay the same


def least_makespans(
    schedule: ScheduleSpec,
    p: int,
    v: int,
    group: int | None,
    m: NDArray[np.int64],
    costs: Costs,
    num_buckets: NDArray[np.int64],
    *,
    blocking: bool,
) -> _Array:
    """Returns [K] seconds that a schedule takes at least, for K costs.

    schedule, p, v, group: see `ScheduleSpec.build`. m: [K] microbatches. num_buckets: [K], 1 or more; and blocking: see
    `ScheduleGraph`.
    """
    seconds = np.zeros(len(m))
    virtual_stages = v if schedule.virtual_stages is None else None
    counted = _counted(schedule, p, group, m)
    for few in np.unique(counted).tolist():
        columns = np.flatnonzero(counted == few)
        outline = _outline(schedule, p, few, virtual_stages, group)
        chains = _Chains(outline, m[columns], costs.take(columns), num_buckets[columns])
        seconds[columns] = chains.longest(blocking=blocking)
    return seconds


def _counted(schedule: ScheduleSpec, p: int, group: int | None, m: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [K] numbers of microbatches, at most m, whose lists begin and end as those of m."""
    if not schedule.takes_groups:
        return np.minimum(m, _SETTLED * p)
    size = group or p
    remainder = m % size
    even = (remainder == 0) | (remainder >= p)  # else all groups depend on their number
    return np.where(even, np.minimum(m, 2 * size + remainder), m)


@dataclass(frozen=True)
class _Work:
    """[ranks, stages] numbers of actions: forwards, gradients of inputs or whole backwards, and of weights alone."""

    forwards: _Array
    grads: _Array
    weights: _Array

    @classmethod
    def of(cls, lists: Sequence[Computations], parts: Sequence[slice], stages: int) -> _Work:
        """Returns those in a part of the list of each rank."""
        counts = [
            [
                actions.per_stage(mask, part, stages)
                for mask in (actions.forward, actions.input_grad, actions.second_half)
            ]
            for actions, part in zip(lists, parts, strict=True)
        ]
        return cls(*np.array(counts, dtype=float).transpose(1, 0, 2))


@dataclass(frozen=True)
class _Outline:
    """What the bound needs to know of the lists, which have `m` microbatches.

    rank_of: [stages]. crosses: [stages - 1, 1], 1 where a boundary is between ranks. Parts of each list: before its first
    gradient of an input; after its last forward; after its last gradient of an input; from the first end of a stage's
    gradients of weights. first_grad, last_forward, last_grad, first_done: [ranks] stages of these actions. meets: [ranks]
    whether the first gradient comes before the last forward. in_flight: [ranks] b, if there is one stage per rank and
    each gradient j comes between forwards j + b - 1 and j + b; else 0.
    """

    m: int
    rank_of: NDArray[np.int64]
    crosses: _Array
    splits_backward: bool
    before: _Work
    after_forwards: _Work
    after_grads: _Work
    after_done: _Work
    first_grad: NDArray[np.int64]
    last_forward: NDArray[np.int64]
    last_grad: NDArray[np.int64]
    first_done: NDArray[np.int64]
    meets: NDArray[np.bool_]
    in_flight: NDArray[np.int64]


@functools.lru_cache(maxsize=4096)
def _outline(schedule: ScheduleSpec, p: int, m: int, v: int | None, group: int | None) -> _Outline:
    rank_of, lists = computations_of(schedule, schedule.sizes(p, m, v, group))
    before, after_forwards, after_grads, after_done = ([] for _ in range(4))
    ends = []  # of each rank: the stages of the four actions, and two facts
    for rank, actions in enumerate(lists):
        forwards, grads = np.flatnonzero(actions.forward), np.flatnonzero(actions.input_grad)
        done = [np.flatnonzero(actions.stage == stage)[-1] for stage in np.flatnonzero(rank_of == rank)]
        first_done = min(done)
        before.append(slice(grads[0]))
        after_forwards.append(slice(forwards[-1] + 1, None))
        after_grads.append(slice(grads[-1] + 1, None))
        after_done.append(slice(first_done, None))
        stages = actions.stage[[grads[0], forwards[-1], grads[-1], first_done]]
        in_flight = int(grads[0])
        in_turn = np.searchsorted(forwards, grads) == np.minimum(m, np.arange(len(grads)) + in_flight)
        in_flight *= len(done) == 1 and bool(in_turn.all())
        ends.append((*stages, grads[0] < forwards[-1], in_flight))
    first_grad, last_forward, last_grad, first, meets, in_flights = np.array(ends).T
    return _Outline(
        m=m,
        rank_of=rank_of,
        crosses=(rank_of[1:] != rank_of[:-1]).astype(float)[:, None],
        splits_backward=schedule.splits_backward,
        before=_Work.of(lists, before, len(rank_of)),
        after_forwards=_Work.of(lists, after_forwards, len(rank_of)),
        after_grads=_Work.of(lists, after_grads, len(rank_of)),
        after_done=_Work.of(lists, after_done, len(rank_of)),
        first_grad=first_grad,
        last_forward=last_forward,
        last_grad=last_grad,
        first_done=first,
        meets=meets.astype(bool),
        in_flight=in_flights,
    )


class _Chains:
    """The chains of one outline, for K costs with [K] microbatches. Arrays are [stages, K] or [ranks, K]."""

    def __init__(self, outline: _Outline, m: NDArray[np.int64], costs: Costs, num_buckets: NDArray[np.int64]) -> None:
        self._outline, self._m, self._num_buckets, self._bucket = outline, m, num_buckets, costs.bucket
        split = outline.splits_backward
        self._forward = costs.forward
        self._grad = costs.input_grad if split else costs.backward
        self._weight = costs.weight_grad if split else np.zeros_like(costs.weight_grad)
        self._fills = costs.weight_grad if split else costs.backward  # the action that fills buckets
        self._hop = outline.crosses * (costs.transfer + costs.latency)
        # Before the first forward of each stage; and from the end of its last gradient to that of the first stage.
        self._path_up = _sums_before(self._forward[:-1] + self._hop)
        self._path_down = _sums_before(self._grad[:-1] + self._hop)

    def longest(self, *, blocking: bool) -> _Array:
        """Returns the [K] seconds of the longest chain."""
        outline, ranks = self._outline, np.arange(len(self._outline.first_grad))
        total = self._seconds(_Work(*(self._of_rank() * outline.m,) * 3))
        alone = self._path_up[ranks] + total  # the ranks' first stages are the first ones
        begun = self._first_grads()[outline.first_grad] + total - self._seconds(outline.before)
        work = np.maximum(alone, begun)
        # The end of each rank's last gradient of an input.
        after = self._seconds(outline.after_forwards)
        round_trip = np.where(outline.meets[:, None], work, alone) - after + self._from_last_forwards()
        left = self._seconds(outline.after_grads)
        ended = np.maximum(work - left, round_trip)
        ended = np.maximum(ended, self._cycles())
        if blocking:
            ended = np.maximum(ended, alone + self._occupied() - left)
        # These gradients go on to the earlier stages.
        reached = np.full_like(self._forward, -np.inf)
        reached[outline.last_grad] = ended + self._path_down[outline.last_grad]
        reached = np.maximum.accumulate(reached[::-1])[::-1] - self._path_down
        finished = np.maximum(ended, reached[outline.last_grad]) + left
        return self._reductions(work, finished).max(axis=0)

    def _of_rank(self) -> _Array:
        """Returns [ranks, stages], 1 for the stages of each rank."""
        ranks = np.arange(len(self._outline.first_grad))
        return (self._outline.rank_of == ranks[:, None]).astype(float)

    def _seconds(self, work: _Work) -> _Array:
        """Returns the seconds of a part of each list. An action that all microbatches of the lists have, all have."""
        total = np.zeros_like(self._forward[: len(work.forwards)])
        for counts, seconds in (
            (work.forwards, self._forward),
            (work.grads, self._grad),
            (work.weights, self._weight),
        ):
            whole = counts == self._outline.m
            total += np.where(whole, 0.0, counts) @ seconds + self._m * (whole @ seconds)
        return total

    def _of_all(self, count: int) -> NDArray[np.int64]:
        return self._m if count == self._outline.m else np.full_like(self._m, count)

    def _first_grads(self) -> _Array:
        """Returns [stages, K], the earliest start of a gradient.

        The last stage runs a number of forwards before it, and they have passed all stages before.
        """
        top = self._outline.rank_of[-1]
        run = self._of_all(int(self._outline.before.forwards[top, -1]))
        start = self._path_up[-1] + self._forward[-1] + (run - 1) * self._forward.max(axis=0)
        back = self._path_down + self._grad
        return start + back[-1] - back

    def _from_last_forwards(self) -> _Array:
        """Returns [ranks, K] seconds from the end of each rank's last forward to that of its last gradient."""
        outline = self._outline
        up = (self._path_up[-1] + self._forward[-1]) - (self._path_up + self._forward)
        down = self._path_down[-1] + self._grad[-1] - self._path_down
        top = outline.rank_of[-1]
        of_top = outline.last_forward[top] == len(outline.rank_of) - 1
        run = self._of_all(int(outline.after_forwards.grads[top, -1]) if of_top else 1)
        slowest = np.maximum.accumulate(self._grad[::-1])[::-1]
        last = outline.last_grad
        return up[outline.last_forward] + down[last] + (run - 1) * slowest[last]

    def _cycles(self) -> _Array:
        """Returns [ranks, K], the end of the last gradient of a rank with one stage.

        It waits for a round trip after every `in_flight` microbatches.
        """
        in_flight = np.stack([self._of_all(count) for count in self._outline.in_flight.tolist()])
        ranks = np.arange(len(in_flight))
        rounds, remainder = np.divmod(self._m - 1, np.maximum(1, in_flight))
        back = self._path_down + self._grad
        up = self._path_up[-1] + self._forward[-1] - self._path_up
        around = (up + back[-1] - self._path_down)[ranks]
        both = (self._forward + self._grad)[ranks]
        ended = self._path_up[ranks] + (rounds + 1) * around + remainder * both
        return np.where((in_flight > 0) & (rounds > 0), ended, 0.0)

    def _occupied(self) -> _Array:
        """Returns [ranks, K] seconds of all transfers of a rank, without the first one to it and the last one from it."""
        edge = np.zeros_like(self._hop[:1]) if len(self._hop) else np.zeros_like(self._forward)
        around = np.concatenate([self._hop, edge]) + np.concatenate([edge, self._hop])
        ranks = np.arange(len(self._outline.first_grad))
        first = np.concatenate([edge, self._hop])[ranks]
        return 2 * self._m * (self._of_rank() @ around) - 2 * first

    def _reductions(self, work: _Array, finished: _Array) -> _Array:
        """Returns [ranks, K], the end of the reductions.

        The last stage is reduced after its last backward, and all stages after the first stage is.
        """
        outline, number = self._outline, self._num_buckets
        last, first = outline.last_grad, outline.first_done
        slow = number * self._bucket[last] - (1 - 1 / number) * self._fills[last]
        of_last = finished + np.maximum(self._bucket[last], slow)
        begun = work - self._seconds(outline.after_done) + self._fills[first] / number
        return np.maximum(of_last, begun + number * (self._of_rank() @ self._bucket))


def _sums_before(steps: _Array) -> _Array:
    """Returns [n + 1, K], the sums of the first 0 to n of n rows."""
    return np.concatenate([np.zeros((1, steps.shape[1])), np.cumsum(steps, axis=0)])
