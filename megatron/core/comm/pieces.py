"""All-gathers and reduce-scatters of rows, cut into pieces, so that products are taken beside them.

A gathered tensor, or one whose sum is scattered, is [size * n, columns]: block r of n rows belongs to rank r. Both
collectives are written as a loop over blocks of rows, in which the caller multiplies:

    full, arriving = comm.gather(shard, least)          shard, leaving = comm.scatter(rows, columns, like, least)
    for rows in arriving:                               for rows, out in leaving:
        multiply(full[rows], out[rows])                     multiply(x[rows], out)

A gather gives the rank's own rows first, then the others' as they come. A scatter asks for the others' rows first, and
sends a piece before it asks for the next; the own rows come last, while pieces are under way. In step i of size - 1 rank r
sends to r + i and receives from r - i. So each piece goes straight from its owner to who needs it: as many bytes as in a
ring, one hop, and no rank waits for another to pass something on.

[Note: sizes of pieces]
What no overlap can hide is the product of the last piece that arrives, or of the first that leaves. So that block is halved
three times. The others are cut in two: the own rows, or the piece before, take about as long as a piece travels. Few
large products are faster than many small ones, each of which reads the whole weight.

[Note: order on CUDA]
Pieces are queued on a stream of high priority, which waits for the stream that wrote them; before it reads a piece, the
current stream waits for its event. The host waits for nothing, and nothing depends on the number of hardware queues
(CUDA_DEVICE_MAX_CONNECTIONS). On the CPU gloo's own threads move the bytes, and the host waits for a piece where it is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced
from megatron.core.comm.lane import Lane, Steps
from megatron.core.comm.pairwise import Message, receive, send, staging_like, sum_in_rank_order
from megatron.core.groups import Group
from megatron.core.timeline import Span, Timeline

_HALVINGS = 3  # of the block whose pieces are small, see the note above
_TAGS = 1 << 16  # far more than exchanges that are under way; a run of months makes more than fit in gloo's 31 bits
_WATCHED = 64  # pieces under way that a timeline can follow at once


class PieceComm:
    """The collectives of one group of at least two; see above. All ranks make the same calls, in the same order."""

    def __init__(self, group: Group, device: torch.device, timeline: Timeline) -> None:
        self.group = group
        self._timeline = timeline
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._lane = Lane("tp", in_flight=_WATCHED)  # only runs while the timeline records
        self._tag = 0

    def gather(self, shard: Tensor, least: int) -> tuple[Tensor, Iterator[slice]]:
        """shard [n, columns] -> ([size * n, columns], its rows in the order in which they may be read).

        No piece has fewer than `least` rows. The iterator must be run to its end: it waits for what it gives, and at last
        for what this rank sends. Communication: an all-gather.
        """
        group, n = self.group, shard.shape[0]
        shard = shard.contiguous()
        full = shard.new_empty((group.size * n, shard.shape[1]))
        blocks = full.view(group.size, n, -1)
        steps = []
        for step in range(1, group.size):
            cuts = _slices(halves(n, least, _HALVINGS if step == group.size - 1 else 1))
            source = (group.rank - step) % group.size
            steps.append([(cut, self._expect("all-gather", step, blocks[source][cut])) for cut in cuts])

        def post(step: int) -> None:
            for cut, exchange in steps[step - 1]:
                exchange.send(shard[cut])

        # What gloo is given together arrives together, at the end: connections share the wire. NCCL keeps the order.
        at_once = 1 if self._stream is None else group.size - 1
        with announced("all_gather", group, tuple(shard.shape), shard.dtype, shard.nbytes):
            for step in range(1, at_once + 1):
                post(step)
        blocks[group.rank].copy_(shard)

        def arriving() -> Iterator[slice]:
            yield _shifted(slice(0, n), group.rank * n)
            for step, exchanges in enumerate(steps, start=1):
                for number, (cut, exchange) in enumerate(exchanges):
                    self._wait("all_gather", exchange.received)
                    if number == 0 and at_once <= step < group.size - 1:
                        post(step + 1)
                    yield _shifted(cut, (group.rank - step) % group.size * n)
            for _, exchange in itertools.chain(*steps):
                self._wait("all_gather", exchange.sent)

        return full, arriving()

    def scatter(
        self, rows: int, columns: int, like: Tensor, least: int
    ) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        """The sum over the group of a tensor [rows, columns], dtype and device of `like`, that the caller computes.

        Returns this rank's block of the sum, [rows / size, columns], which is there when the iterator has been run to its
        end, and the iterator: (rows to compute, where to write them) in the order in which they are needed.
        No piece has fewer than `least` rows. Sums are taken in rank order, half precision in fp32.
        Communication: a reduce-scatter.
        """
        group, n = self.group, rows // self.group.size
        shard = like.new_empty((n, columns))
        # By rank; this rank's own entry is the shard.
        outgoing = staging_like([shard] * group.size, group.rank)
        incoming = staging_like([shard] * group.size, group.rank)

        def leaving() -> Iterator[tuple[slice, Tensor]]:
            exchanges = []
            for step in range(1, group.size):
                cuts = _slices(halves(n, least, _HALVINGS if step == 1 else 1)[::-1])
                to, source = ((group.rank + way) % group.size for way in (step, -step))
                exchanges += [(cut, to, self._expect("reduce-scatter", step, incoming[source][cut])) for cut in cuts]
            with announced("reduce_scatter", group, (rows, columns), shard.dtype, group.size * shard.nbytes):
                pass  # it starts here, piece by piece
            for cut, to, exchange in exchanges:
                yield _shifted(cut, to * n), outgoing[to][cut]
                exchange.send(outgoing[to][cut])
            yield _shifted(slice(0, n), group.rank * n), shard
            for _, _, exchange in exchanges:
                self._wait("reduce_scatter", exchange.received)
            sum_in_rank_order(incoming, group.rank, shard)
            for _, _, exchange in exchanges:
                self._wait("reduce_scatter", exchange.sent)

        return shard, leaving()

    def _expect(self, op: str, step: int, incoming: Tensor) -> _HostExchange | _DeviceExchange:
        """Of step i: a piece for rank r + i and one from r - i."""
        self._tag = (self._tag + 1) % _TAGS
        label = f"{op}, step {step}"
        if self._stream is not None:
            return _DeviceExchange(self.group, step, incoming, self._stream, self._timeline, label)
        return _HostExchange(self.group, step, incoming, self._tag, self._lane, self._timeline, label)

    def _wait(self, op: str, work: Any) -> None:
        Handle(op, self.group, work, ()).wait()


class _HostExchange:
    """On gloo. The receive is posted at once: a rank that is ahead need not wait for this one to be ready to send."""

    def __init__(
        self, group: Group, step: int, incoming: Tensor, tag: int, lane: Lane, timeline: Timeline, label: str
    ) -> None:
        self._group, self._step, self._tag = group, step, tag
        self._lane, self._timeline, self._label = lane, timeline, label
        self._kept = [incoming]
        self._arriving = receive(group, incoming, (group.rank - step) % group.size, tag)

    def send(self, outgoing: Tensor) -> None:
        """Post the message."""
        self._kept.append(outgoing)
        span = self._timeline.begin("tp", self._label)
        self.sent: Any = send(self._group, outgoing, (self._group.rank + self._step) % self._group.size, self._tag)
        # Only a thread that waits sees when a message arrives.
        self.received: Any = self._arriving if span is None else self._lane.submit(_watched(self._arriving, span))


class _DeviceExchange:
    """On NCCL: one launch for both messages."""

    def __init__(
        self, group: Group, step: int, incoming: Tensor, stream: torch.cuda.Stream, timeline: Timeline, label: str
    ) -> None:
        self._group, self._step, self._stream = group, step, stream
        self._timeline, self._label = timeline, label
        self._kept = [incoming]

    def send(self, outgoing: Tensor) -> None:
        """Queue the messages behind what is on the current stream."""
        self._kept.append(outgoing)
        group = self._group
        to, source = (group.ranks[(group.rank + way) % group.size] for way in (self._step, -self._step))
        messages = [
            dist.P2POp(dist.irecv, self._kept[0], source, group.process_group),
            dist.P2POp(dist.isend, outgoing, to, group.process_group),
        ]
        self._stream.wait_stream(torch.cuda.current_stream(outgoing.device))
        with torch.cuda.stream(self._stream):
            with self._timeline.span("tp", self._label):
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
            event = self._stream.record_event()
        group.heartbeat.track("pieces", group.ranks, group.name, event.query)
        self.received = self.sent = event  # whose `wait` makes the current stream wait


def _watched(message: Message, span: Span) -> Steps:
    yield [message]
    span.end()


def halves(n: int, least: int, times: int) -> list[int]:
    """n as the sum of up to `times` + 1 numbers, each half of what is left, none below `least` (but n itself may be)."""
    sizes: list[int] = []
    while len(sizes) < times and n >= 2 * least:
        sizes.append(n - n // 2)
        n //= 2
    return [*sizes, n]


def _slices(sizes: Sequence[int]) -> list[slice]:
    borders = itertools.accumulate(sizes, initial=0)
    return [slice(start, stop) for start, stop in itertools.pairwise(borders)]


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
