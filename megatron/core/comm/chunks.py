"""All-gathers and reduce-scatters of rows, split into chunks, so that GEMMs are overlapped with them.

A gathered tensor, or one whose sum is scattered, is [size * n, columns]: block r of n rows belongs to rank r. Both
collectives are written as a loop over ranges of rows, in which the caller multiplies:

    full, arriving = comm.gather(shard, least)          shard, leaving = comm.scatter(rows, columns, like, least)
    for rows in arriving:                               for rows, out in leaving:
        multiply(full[rows], out[rows])                     multiply(x[rows], out)

A gather gives the rank's own rows first, then the others' in the order of arrival. A scatter asks for the others' rows
first, and sends a chunk before it asks for the next; the own rows come last, while chunks are in flight. In step i of
size - 1 rank r sends to r + i and receives from r - i. So each chunk goes straight from its owner to the rank that
needs it: as many bytes as in a ring, one hop, and no rank waits for another to pass something on.

[Note: sizes of chunks] No overlap can hide the GEMM of the last chunk that arrives, or of the first that leaves. So
that block is halved three times. The others are cut in two: the GEMM of the own rows, or of the chunk before, takes
about as long as the transfer of a chunk. Few large GEMMs are faster than many small ones, each of which reads the whole
weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.core.comm.collectives import Handle, announced
from megatron.core.comm.pairwise import staging_like, sum_in_rank_order
from megatron.core.comm.transport import ChunkExchange, transport_of
from megatron.core.groups import Group
from megatron.core.streams.stream import Waitable
from megatron.core.streams.streams import Streams

_HALVINGS = 3  # of the block whose chunks are small, see the note above
_TAGS = 1 << 16  # many more than exchanges in flight; a run of months makes more than fit in gloo's 31 bits


class ChunkComm:
    """The collectives of one group of at least two; see above. All ranks make the same calls, in the same order."""

    def __init__(self, group: Group, streams: Streams) -> None:
        self.group = group
        self._transport = transport_of(streams.device)
        self._stream = streams.stream("tp")
        self._tag = 0

    def gather(self, shard: Tensor, least: int) -> tuple[Tensor, Iterator[slice]]:
        """shard [n, columns] -> ([size * n, columns], its rows in the order in which they may be read).

        No chunk has fewer than `least` rows. The iterator must be run to its end: it waits for the rows that it gives,
        and at last for the chunks that this rank sends. Communication: an all-gather.
        """
        group, n = self.group, shard.shape[0]
        shard = shard.contiguous()
        full = shard.new_empty((group.size * n, shard.shape[1]))
        blocks = full.view(group.size, n, -1)
        steps = []
        for step in range(1, group.size):
            chunks = _slices(halves(n, least, _HALVINGS if step == group.size - 1 else 1))
            source = (group.rank - step) % group.size
            steps.append([(chunk, self._expect("all-gather", step, blocks[source][chunk])) for chunk in chunks])

        def post(step: int) -> None:
            for chunk, exchange in steps[step - 1]:
                exchange.send(shard[chunk])

        at_once = self._transport.steps_in_flight(group.size)
        with announced("all_gather", group, tuple(shard.shape), shard.dtype, shard.nbytes):
            for step in range(1, at_once + 1):
                post(step)
        blocks[group.rank].copy_(shard)

        def arriving() -> Iterator[slice]:
            yield _shifted(slice(0, n), group.rank * n)
            for step, exchanges in enumerate(steps, start=1):
                for number, (chunk, exchange) in enumerate(exchanges):
                    self._wait("all_gather", exchange.received)
                    if number == 0 and at_once <= step < group.size - 1:
                        post(step + 1)
                    yield _shifted(chunk, (group.rank - step) % group.size * n)
            for _, exchange in itertools.chain(*steps):
                self._wait("all_gather", exchange.sent)

        return full, arriving()

    def scatter(
        self, rows: int, columns: int, like: Tensor, least: int
    ) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        """The sum over the group of a tensor [rows, columns], dtype and device of `like`, that the caller computes.

        Returns this rank's block of the sum, [rows / size, columns], which is there when the iterator has been run to
        its end, and the iterator: (rows to compute, where to write them) in the order in which they are needed. No
        chunk has fewer than `least` rows. Sums are taken in rank order, half precision in fp32. Communication: a
        reduce-scatter.
        """
        group, n = self.group, rows // self.group.size
        shard = like.new_empty((n, columns))
        # By rank; this rank's own entry is the shard.
        outgoing = staging_like([shard] * group.size, group.rank)
        incoming = staging_like([shard] * group.size, group.rank)

        def leaving() -> Iterator[tuple[slice, Tensor]]:
            exchanges = []
            for step in range(1, group.size):
                chunks = _slices(halves(n, least, _HALVINGS if step == 1 else 1)[::-1])
                to, source = ((group.rank + offset) % group.size for offset in (step, -step))
                for chunk in chunks:
                    exchanges.append((chunk, to, self._expect("reduce-scatter", step, incoming[source][chunk])))
            with announced("reduce_scatter", group, (rows, columns), shard.dtype, group.size * shard.nbytes):
                pass  # it starts here, chunk by chunk
            for chunk, to, exchange in exchanges:
                yield _shifted(chunk, to * n), outgoing[to][chunk]
                exchange.send(outgoing[to][chunk])
            yield _shifted(slice(0, n), group.rank * n), shard
            for _, _, exchange in exchanges:
                self._wait("reduce_scatter", exchange.received)
            sum_in_rank_order(incoming, group.rank, shard)
            for _, _, exchange in exchanges:
                self._wait("reduce_scatter", exchange.sent)

        return shard, leaving()

    def _expect(self, op: str, step: int, incoming: Tensor) -> ChunkExchange:
        """An exchange of step i: a chunk to rank r + i and one from r - i."""
        self._tag = (self._tag + 1) % _TAGS
        name = f"{op}, step {step}"
        return self._transport.exchange_chunk(self.group, step, incoming, self._tag, self._stream, name)

    def _wait(self, op: str, work: Waitable) -> None:
        Handle(op, self.group, work, ()).wait()


def halves(n: int, least: int, times: int) -> list[int]:
    """n as the sum of up to `times` + 1 numbers, each half of what is left, none below `least` (but n itself may
    be)."""
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
