"""All-gathers and reduce-scatters of rows, cut into pieces, so that products are taken beside them.

A gathered tensor, or one whose sum is scattered, is [size * n, columns]: block r of n rows belongs to rank r. Each block
is cut into the same pieces. Both collectives are written as a loop over blocks of rows, in which the caller multiplies:

    full, arriving = comm.gather(shard, least)          shard, leaving = comm.scatter(rows, columns, like, least)
    for rows in arriving:                               for rows, out in leaving:
        multiply(full[rows], out[rows])                     multiply(x[rows], out)

A gather gives the rank's own rows first, then the others', piece by piece. A scatter asks for the others' rows first, and
sends a piece before it asks for the next; the own rows come last, while all pieces are under way. Rank r talks to r + 1
and r - 1 first, as in a ring, but each piece goes straight from its owner to who needs it: as many bytes, one hop, and no
rank waits for another to pass something on.

[Note: sizes of pieces]
What no overlap can hide is the product of the last piece that arrives, or of the first that leaves. So these are small. The
others need not be: when half of a block arrives, the own rows have been worked on for as long. Each piece of a gather is
half of what is left, a scatter has the same sizes in the opposite order, and four pieces do what eight equal ones would.
Few large products are faster than many small ones, each of which reads the whole weight.

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
from megatron.core.comm.pairwise import Message, others_of, receive, send, staging_like, sum_in_rank_order
from megatron.core.groups import Group
from megatron.core.timeline import Span, Timeline

_MOST = 4  # pieces of a block: the smallest is an eighth of it
_WATCHED = 64  # pieces under way that a timeline can follow at once


class PieceComm:
    """The collectives of one group; see above. All ranks make the same calls with the same shapes, in the same order."""

    def __init__(self, group: Group, device: torch.device, timeline: Timeline) -> None:
        self.group = group
        self._timeline = timeline
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._lane = Lane("tp", in_flight=_WATCHED)  # only runs while the timeline records
        self._tag = 0

    def gather(self, shard: Tensor, least: int) -> tuple[Tensor, Iterator[slice]]:
        """shard [n, columns] -> ([size * n, columns], its rows in the order in which they may be read).

        No piece has fewer than `least` rows. All leave at once. The iterator must be run to its end: it waits for what it
        gives, and at last for what this rank sends. Communication: an all-gather.
        """
        group, n = self.group, shard.shape[0]
        shard = shard.contiguous()
        full = shard.new_empty((group.size * n, shard.shape[1]))
        blocks = full.view(group.size, n, -1)
        exchanges = []
        for number, rows in enumerate(_slices(halves(n, least))):
            exchange = self._expect(f"all-gather {number}", [block[rows] for block in blocks])
            with announced("all_gather", group, tuple(shard[rows].shape), shard.dtype, shard[rows].nbytes):
                exchange.send([shard[rows]] * group.size)
            exchanges.append((rows, exchange))
        blocks[group.rank].copy_(shard)

        def arriving() -> Iterator[slice]:
            yield _shifted(slice(0, n), group.rank * n)
            for rows, exchange in exchanges:
                self._wait("all_gather", exchange.received)
                for other in reversed(others_of(group)):
                    yield _shifted(rows, other * n)
            for _, exchange in exchanges:
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
        cuts = _slices(halves(n, least)[::-1])

        def leaving() -> Iterator[tuple[slice, Tensor]]:
            exchanges = [
                self._expect(f"reduce-scatter {number}", [block[cut] for block in incoming])
                for number, cut in enumerate(cuts)
            ]
            for cut, exchange in zip(cuts, exchanges, strict=True):
                for other in others_of(group):
                    yield _shifted(cut, other * n), outgoing[other][cut]
                nbytes = group.size * shard[cut].nbytes
                shape = (group.size * (cut.stop - cut.start), columns)
                with announced("reduce_scatter", group, shape, shard.dtype, nbytes):
                    exchange.send([block[cut] for block in outgoing])
            yield _shifted(slice(0, n), group.rank * n), shard
            for cut, exchange in zip(cuts, exchanges, strict=True):
                self._wait("reduce_scatter", exchange.received)
                sum_in_rank_order([block[cut] for block in incoming], group.rank, shard[cut])
            for exchange in exchanges:
                self._wait("reduce_scatter", exchange.sent)

        return shard, leaving()

    def _expect(self, label: str, incoming: Sequence[Tensor]) -> _HostExchange | _DeviceExchange:
        self._tag += 1
        if self._stream is not None:
            return _DeviceExchange(self.group, self._stream, self._timeline, label, incoming)
        return _HostExchange(self.group, self._lane, self._timeline, label, incoming, self._tag)

    def _wait(self, op: str, work: Any) -> None:
        Handle(op, self.group, work, ()).wait()


class _Works:
    """Messages as one piece of work."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


class _HostExchange:
    """A piece for every other rank and one from each, on gloo. Receives are posted at once: a rank that is ahead need not
    wait for this one to be ready to send."""

    def __init__(
        self, group: Group, lane: Lane, timeline: Timeline, label: str, incoming: Sequence[Tensor], tag: int
    ) -> None:
        self._group, self._lane, self._timeline, self._label, self._tag = group, lane, timeline, label, tag
        self._kept = [incoming]
        self._arriving = receive(group, incoming, tag)

    def send(self, outgoing: Sequence[Tensor]) -> None:
        """Post the messages."""
        self._kept.append(outgoing)
        span = self._timeline.begin("tp", self._label)
        self.sent: Any = _Works(send(self._group, outgoing, self._tag))
        # Only a thread that waits sees when a message arrives.
        self.received: Any = (
            _Works(self._arriving) if span is None else self._lane.submit(_watched(self._arriving, span))
        )


class _DeviceExchange:
    """A piece for every other rank and one from each, on NCCL: one launch for all of them."""

    def __init__(
        self, group: Group, stream: torch.cuda.Stream, timeline: Timeline, label: str, incoming: Sequence[Tensor]
    ) -> None:
        self._group, self._stream, self._timeline, self._label = group, stream, timeline, label
        self._kept = [incoming]

    def send(self, outgoing: Sequence[Tensor]) -> None:
        """Queue the messages behind what is on the current stream."""
        self._kept.append(outgoing)
        group, transport = self._group, self._group.process_group
        incoming = self._kept[0]
        messages = [
            dist.P2POp(call, tensors[r], group.ranks[r], transport)
            for r in others_of(group)
            for call, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
        ]
        self._stream.wait_stream(torch.cuda.current_stream(outgoing[0].device))
        with torch.cuda.stream(self._stream):
            with self._timeline.span("tp", self._label):
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
            event = self._stream.record_event()
        group.heartbeat.track("pieces", group.ranks, group.name, event.query)
        self.received = self.sent = event  # whose `wait` makes the current stream wait


def _watched(messages: list[Message], span: Span) -> Steps:
    yield messages
    span.end()


def halves(n: int, least: int) -> list[int]:
    """n as the sum of at most four numbers, each half of what is left, none below `least` (but n itself may be)."""
    sizes: list[int] = []
    while len(sizes) < _MOST - 1 and n >= 2 * least:
        sizes.append(n - n // 2)
        n //= 2
    return [*sizes, n]


def _slices(sizes: Sequence[int]) -> list[slice]:
    borders = itertools.accumulate(sizes, initial=0)
    return [slice(start, stop) for start, stop in itertools.pairwise(borders)]


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
