"""Times of messages between the ranks of the world, by operation, size and placement, and what they cost computation.

Groups of one stride are measured together, as they communicate in a run: ranks of a node share its interfaces. The time
of a message is that of the slowest rank.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron.base.mesh import DENSE, Mesh
from megatron.core.comm.all_to_all import all_to_all_async
from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import (
    all_gather_async,
    all_reduce_async,
    barrier,
    gather_objects,
    reduce_scatter_async,
)
from megatron.core.comm.p2p import shift_async
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.groups import Group, Groups, create_groups
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline, laps
from megatron.planner.time.boundaries import NEARBY, end_of_chain
from megatron.planner.time.hardware import Place
from megatron.planner.time.profile_file import (
    BUCKET_ALL_REDUCE,
    BUCKET_GATHER,
    BUCKET_REDUCE_SCATTER,
    SEND,
    MessageRow,
)
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SHIFT
from megatron.tooling.profile.budget import WARM_UPS, Budget, Sample, calls_of

_SMALLEST, _LARGEST, _RATIO = 1 << 12, {"cpu": 1 << 24, "cuda": 1 << 28}, 8
_LEAST, _MOST = 3, 15  # repeats
_TIMEOUT = 600.0
_SIDE = {"cpu": 256, "cuda": 4096}  # of the products that are slowed down
_TWICE = 2.0  # computation lasts so many times as long as the message that it hides


class Started(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Returns when it is there."""
        ...


@dataclass(frozen=True)
class _Sender:
    """start: makes, from a number of bytes, the function that starts a message of so many. takes_part: whether
    this rank sends or receives."""

    op: str
    place: Place
    start: Callable[[int], Callable[[], Started]]
    takes_part: bool = True


def measure_messages(
    world: Group,
    node: int,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int],
    budget: Budget,
    share: float,
) -> list[MessageRow]:
    """Returns the rows of all operations and placements. sizes: bytes to measure besides a series of them.

    node: ranks that share a host. Collective over the world: all ranks return the same rows.
    """
    rows: list[MessageRow] = []
    for sender in _senders(world, node, device, dtype):
        rows += _series(sender, world, device, sizes, budget, share)
    return rows


def placements(world_size: int, node: int) -> list[tuple[int, Place]]:
    """Returns (stride, placement) of the groups along an axis of any mesh, each placement once."""
    strides: dict[Place, int] = {}
    for stride in _divisors(world_size):
        for size in _divisors(world_size // stride):
            if size > 1:
                strides.setdefault(Place(size, max(1, min(size, node // stride))), stride)
    return [(stride, place) for place, stride in strides.items()]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _senders(world: Group, node: int, device: torch.device, dtype: torch.dtype) -> Iterator[_Sender]:
    streams = Streams(device, Timeline(device))
    for stride, place in placements(world.size, node):
        mesh = Mesh.create(world.size, tp=stride, pp=world.size // (stride * place.size))
        groups = create_groups(mesh, world.rank, world.heartbeat, _TIMEOUT)
        barrier(groups.dp)
        yield from _collectives(groups.dp, place, device, dtype)
        yield from _buckets(groups, place, device, dtype, streams)
        apart = create_groups(mesh, world.rank, world.heartbeat, _TIMEOUT, optimizer_instances=None)
        yield _bucket_sum(apart, place, device, streams)
    for stride, place in pipeline_places(world.size, node):
        mesh = Mesh.create(world.size, tp=stride, pp=world.size // stride)
        groups = create_groups(mesh, world.rank, world.heartbeat, _TIMEOUT)
        yield _neighbours(groups, place, device, dtype, streams)


def pipeline_places(world_size: int, node: int) -> list[tuple[int, Place]]:
    """Returns (stride, placement) of neighbours along the pipelines of any mesh: in a node, and at the end of a chain
    of neighbours that share one. The more of them share it, the fewer send to other nodes at once."""
    inside = [(1, NEARBY)] if node > 1 else []
    strides = [stride for stride in _divisors(node) if stride < world_size and node < world_size]
    return inside + [(stride, end_of_chain(node // stride)) for stride in strides]


def _collectives(group: Group, place: Place, device: torch.device, dtype: torch.dtype) -> Iterator[_Sender]:
    n = group.size

    def numbers(nbytes: int, parts: int) -> torch.Tensor:
        return torch.zeros(max(1, nbytes // dtype.itemsize // parts), dtype=dtype, device=device)

    def gather(nbytes: int) -> Callable[[], Started]:
        shard = numbers(nbytes, n)
        return lambda: all_gather_async(shard, group)[1]

    def scatter(nbytes: int) -> Callable[[], Started]:
        full = numbers(nbytes, n).repeat(n)
        return lambda: reduce_scatter_async(full, group)[1]

    def reduce(nbytes: int) -> Callable[[], Started]:
        tensor = numbers(nbytes, 1)
        return lambda: all_reduce_async(tensor, group)

    def exchange(nbytes: int) -> Callable[[], Started]:
        tensor = numbers(nbytes, n).repeat(n, 1)
        return lambda: all_to_all_async(tensor, group)[1]

    def shift(nbytes: int) -> Callable[[], Started]:
        tensor = numbers(nbytes, 1)
        return lambda: shift_async(tensor, group)[1]

    yield _Sender(ALL_GATHER, place, gather)
    yield _Sender(REDUCE_SCATTER, place, scatter)
    yield _Sender(ALL_REDUCE, place, reduce)
    yield _Sender(ALL_TO_ALL, place, exchange)
    yield _Sender(SHIFT, place, shift)


def _buckets(
    groups: Groups, place: Place, device: torch.device, dtype: torch.dtype, streams: Streams
) -> Iterator[_Sender]:
    comm, view = BucketComm(torch.float32, streams), groups.views[DENSE]

    def gather(nbytes: int) -> Callable[[], Started]:
        full = torch.zeros(max(1, nbytes // dtype.itemsize // place.size) * place.size, dtype=dtype, device=device)
        return lambda: comm.gather(view, full, "probe")

    yield _Sender(BUCKET_GATHER, place, gather)
    yield _Sender(BUCKET_REDUCE_SCATTER, place, lambda nbytes: _reduce(comm, groups, place, device, nbytes))


def _bucket_sum(groups: Groups, place: Place, device: torch.device, streams: Streams) -> _Sender:
    comm = BucketComm(torch.float32, streams)
    return _Sender(BUCKET_ALL_REDUCE, place, lambda nbytes: _reduce(comm, groups, place, device, nbytes))


def _reduce(comm: BucketComm, groups: Groups, place: Place, device: torch.device, nbytes: int) -> Callable[[], Started]:
    full = torch.zeros(max(1, nbytes // torch.float32.itemsize // place.size) * place.size, device=device)
    return lambda: comm.reduce(groups.views[DENSE], full, "probe")


def _neighbours(groups: Groups, place: Place, device: torch.device, dtype: torch.dtype, streams: Streams) -> _Sender:
    """Every second chain of pipeline ranks sends from its last rank to the next one; in a node every second rank does.
    Others do nothing."""
    mailbox, me, last = Mailbox(groups, streams), groups.pp.rank, groups.pp.size - 1
    chain = place.together if place.nodes > 1 else 1
    sends = me % (2 * chain) == chain - 1 and me < last
    receives = me % (2 * chain) == chain

    def send(nbytes: int) -> Callable[[], Started]:
        shape = (max(1, nbytes // dtype.itemsize),)
        tensor = torch.zeros(shape, dtype=dtype, device=device)

        def start() -> Started:
            if sends:
                mailbox.send(tensor, me + 1, "probe")
                return _Then(mailbox.flush)
            if receives:
                return _Then(mailbox.receive(shape, dtype, me - 1, "probe").take)
            return _Then(lambda: None)

        return start

    return _Sender(SEND, place, send, takes_part=sends or receives)


@dataclass(frozen=True)
class _Then:
    """What ends a message."""

    end: Callable[[], object]

    def wait(self) -> None:
        """See Started."""
        self.end()


def _series(
    sender: _Sender, world: Group, device: torch.device, sizes: Sequence[int], budget: Budget, share: float
) -> list[MessageRow]:
    """The sizes that say most come first: a small one and then large ones, whose difference is the rate; those between
    and around follow."""
    first = [_SMALLEST, *(_SMALLEST * _RATIO**power for power in (2, 3))]
    series = [_SMALLEST * _RATIO**power for power in (1, *range(4, 20))]
    further = [
        nbytes for nbytes in sorted({*series, *sizes}) if nbytes <= _LARGEST[device.type] and nbytes not in first
    ]
    samples: list[tuple[int, Sample]] = []
    for nbytes in (*first, *further):
        name = f"{sender.op} of {nbytes} bytes on {sender.place.size} ranks, {sender.place.together} on a node"
        if len(samples) > 1 and _expected(samples, nbytes) > budget.of_one():
            continue  # those before took long enough for their rate
        if _agreed(world, nbytes in first or budget.allows(name, share)):
            samples.append((nbytes, _alone(sender.start(nbytes), world, device, budget.of_one() / 4)))
    samples.sort(key=lambda item: item[0])
    lost = _lost_by(samples, sender, world, device, budget.of_one() / 4)
    return [
        MessageRow(
            op=sender.op,
            ranks=sender.place.size,
            together=sender.place.together,
            nbytes=nbytes,
            seconds=sample.median,
            interference=lost(sample.median) / sample.median,
            spread=sample.spread,
        )
        for nbytes, sample in samples
    ]


def _lost_by(
    samples: Sequence[tuple[int, Sample]], sender: _Sender, world: Group, device: torch.device, longest: float
) -> Callable[[float], float]:
    """Returns what computation loses to a message of so many seconds: measured beside the smallest message and the
    largest one of at most `longest` seconds, and in proportion between them."""
    large = [number for number, (_, sample) in enumerate(samples) if sample.median < longest]
    chosen = [samples[number] for number in sorted({0, *large[-1:]})]
    points = sorted((sample.median, _lost(sender, nbytes, sample.median, world, device)) for nbytes, sample in chosen)
    seconds, lost = zip(*points, strict=True)
    return lambda taken: float(np.interp(taken, seconds, lost))


def _expected(samples: Sequence[tuple[int, Sample]], nbytes: int) -> float:
    """Seconds of a message, by the two largest that were measured."""
    (x0, before), (x1, last) = sorted(samples, key=lambda item: item[0])[-2:]
    return last.median + max(0.0, last.median - before.median) / (x1 - x0) * (nbytes - x1)


def _agreed(world: Group, mine: bool) -> bool:
    """The decision of rank 0."""
    return bool(gather_objects(mine, world)[0])


def _alone(start: Callable[[], Started], world: Group, device: torch.device, seconds: float) -> Sample:
    """All ranks begin together; the slowest one counts."""
    barrier(world)
    start().wait()
    barrier(world)
    call_seconds = laps(device, [lambda: start().wait()])[0].device
    calls = calls_of(device.type == "cuda", max(gather_objects(call_seconds, world)))

    def chain() -> None:
        for _ in range(calls):
            start().wait()

    return _slowest(lambda: laps(device, [chain])[0].device / calls, world, seconds / calls)


def _slowest(once: Callable[[], float], world: Group, seconds: float) -> Sample:
    """Messages that take longer than all of this have no warm-up."""
    values = [once()]
    longest = max(gather_objects(values[0], world))
    skipped = 0 if longest > seconds else WARM_UPS
    for _ in range(skipped + min(_MOST, max(_LEAST, int(seconds / max(longest, 1e-9)))) - 1):
        barrier(world)
        values.append(once())
    ranks = gather_objects(values[skipped:], world)
    return Sample.of([max(repeat) for repeat in zip(*ranks, strict=True)])


def _lost(sender: _Sender, nbytes: int, seconds: float, world: Group, device: torch.device) -> float:
    """The seconds by which a computation, twice as long as the message, ends later when the message travels.

    It is the median over the repeats of all ranks that take part: a maximum over ranks would add what their speed
    varies by.
    """
    start, side = sender.start(nbytes), _SIDE[device.type]
    x = torch.rand((side, side), device=device)
    out = torch.empty_like(x)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(x, x, out=out)

    compute(WARM_UPS)
    product_seconds = statistics.median(laps(device, [functools.partial(compute, 1)])[0].device for _ in range(_LEAST))
    longest = max(gather_objects(product_seconds, world))
    number = max(4, int(_TWICE * seconds / longest))
    calls = calls_of(device.type == "cuda", number * longest)

    def alone() -> None:
        compute(calls * number)

    def hiding() -> None:
        for _ in range(calls):
            started = start()
            compute(number)
            started.wait()

    barrier(world)
    times = [lap.device / calls for lap in laps(device, [alone, hiding] * (1 + _LEAST))[2:]]
    lost = [slower - plain for plain, slower in zip(times[::2], times[1::2], strict=True)] if sender.takes_part else []
    return max(0.0, statistics.median(difference for rank in gather_objects(lost, world) for difference in rank))
