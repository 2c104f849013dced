"""The computations of a step on one pipeline rank: the moment with the most memory, by kinds and with its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.pipeline import PipelineSettings
from megatron.planner.memory.moments import (
    AWAY,
    DEFERRED,
    FORWARD,
    KEPT,
    OF_GROUPS,
    Messages,
    MomentCounts,
    enough_microbatches,
    messages_of,
    rank_moments,
)
from megatron.planner.memory.stage import StageMemory
from megatron.planner.schedule.computations import Computations, computations_of
from megatron.spec.memory.trace import ACTIVATIONS, COMMUNICATION, MemoryTrace, Profile, profile_of
from megatron.spec.sizes import Sizes


@dataclass(frozen=True)
class StepMemory:
    """peak: the most that the computations take at once. host: the most bytes of activations in host memory. in_flight:
    the most (stage, microbatch) pairs whose activations exist at once."""

    peak: Profile
    host: int
    in_flight: int


def step_memory(
    pipeline: PipelineSettings,
    rank: int,
    by_layer: Sequence[StageMemory],
    whole: Sequence[StageMemory],
    ratio: float,
    sizes: Sizes,
    *,
    staging: int,
    microbatches: int,
) -> StepMemory:
    """Returns the memory of a rank's computations.

    by_layer, whole: of the rank's stages, for microbatches whose activations leave the device layer by layer, and by
    the schedule, which moves a `ratio` of them. staging: bytes of a reduction in the last computation of a stage.
    microbatches: of a step; those in the middle are left out where that changes nothing, and names skip them.
    """
    p, v = pipeline.placement.num_ranks, len(whole)
    all_of_them = pipeline.schedule.sizes(p, microbatches, v, pipeline.group, pairs=pipeline.pairs)
    shape = enough_microbatches(pipeline.schedule, all_of_them)
    rank_of, lists = computations_of(pipeline.schedule, shape)
    if pipeline.overlap and not pipeline.pairs:
        messages = messages_of(rank_of, rank, lists, overlap=True)
    else:
        messages = Messages.listed(pipeline.schedule_of(shape.m, checked=False).actions[rank])
    counts = rank_moments(rank_of, rank, lists[rank], range(v), messages, offload=ratio > 0, cpu=sizes.target.cpu)
    works = list[Profile]()
    away = [{kind: int(ratio * stage.forward.net.get(kind, 0)) for kind in ACTIVATIONS} for stage in whole]
    for resident, moving, moved in zip(by_layer, whole, away, strict=True):
        works += _counted(resident, staging, splits=sizes.split_backward)
        works += [*_counted(moving, staging, splits=sizes.split_backward), _held(moved)] if ratio else []
    works.append(_held({COMMUNICATION: sizes.residual}))
    place = int((counts @ np.array([work.peak for work in works])).argmax())
    number = int(lists[rank].microbatch[place])
    number += microbatches - shape.m if number >= shape.m // 2 else 0
    top, moment = Counter[str](), [f"{_name(lists[rank], place)} of microbatch {number}"]
    for count, work in zip(counts[place].tolist(), works, strict=True):
        if count:
            top.update({kind: count * size for kind, size in work.top.items()})
            moment += [work.moment] if work.moment else []
    of_stages = counts[:, :-1].reshape(len(counts), v, -1)
    on_host = [sum(stage.by_layer) for stage in by_layer], [sum(moved.values()) for moved in away]
    return StepMemory(
        Profile({}, top, ": ".join(moment), {}),
        _most_on_host(of_stages, *map(np.array, on_host)),
        _in_flight(of_stages),
    )


def _most_on_host(counts: MomentCounts, by_layer: NDArray[np.int64], moved: NDArray[np.int64]) -> int:
    """The most bytes of activations in host memory, [computations, stages, counts] of a rank. by_layer, moved: bytes of
    a microbatch of each stage that move layer by layer, or by actions of the schedule."""
    kept = counts[:, :, KEPT] @ by_layer
    most = np.maximum(kept, np.append(kept[1:], 0))  # before and behind each computation
    if counts.shape[2] > AWAY:
        # A group arrives in the computation behind its forward, and before the memory of one that returns is free.
        arrives = counts[:, :, OF_GROUPS + FORWARD] @ moved
        most += np.append(0, arrives[:-1]) - counts[:, :, AWAY] @ moved
    return int(most.max())


def _in_flight(counts: MomentCounts) -> int:
    """The most microbatches of stages whose activations exist at once. counts: as above."""
    groups = [0, OF_GROUPS] if counts.shape[2] > AWAY else [0]
    columns = [group + count for group in groups for count in (KEPT, DEFERRED, FORWARD)]
    return int(counts[:, :, columns].sum(axis=(1, 2)).max())


def _counted(stage: StageMemory, staging: int, *, splits: bool) -> list[Profile]:
    """What each count of a class of stages stands for, see moments.py."""

    def backward(trace: MemoryTrace) -> None:
        trace.replay(stage.head)
        trace.replay(stage.backward)

    def last(trace: MemoryTrace) -> None:
        trace.replay(Profile({}, {}, "", {}) if splits else stage.head)
        trace.take(COMMUNICATION, staging)
        trace.replay(stage.weight_grad if splits else stage.backward)

    whole = profile_of(backward)
    kept, deferred = Counter(stage.forward.net), Counter(stage.forward.net)
    deferred.update(whole.net)
    del kept[COMMUNICATION], deferred[COMMUNICATION]  # messages have a count of their own
    return [_held(kept), _held(deferred), stage.forward, whole, stage.weight_grad, profile_of(last)]


def _held(sizes: Mapping[str, int]) -> Profile:
    """Bytes by kind that are in use all the time."""
    return Profile({}, sizes, "", {})


def _name(computations: Computations, place: int) -> str:
    """The name of a computation."""
    if computations.forward[place]:
        return "forward"
    if computations.second_half[place]:
        return "backward (weights)"
    return "backward (input)" if computations.first_half[place] else "backward"
