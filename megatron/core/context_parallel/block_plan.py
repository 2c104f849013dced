"""Which blocks of queries and keys a rank has to attend, under the balanced layout (see `layout`). Pure arithmetic.

Blocks that no query sees are left out, and so are keys and queries outside of a window. So every query of a block
sees a key of it (segments aside), and the first block of a query holds its own key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.core.context_parallel.layout import chunks_of

Runs = Mapping[int, slice]  # document of a sample -> its places among the tokens of a rank


class Block(NamedTuple):
    """Attention of `queries` to `keys`, both runs of neighbouring positions. `offset`, `window`: see `Rule`."""

    queries: slice
    keys: slice
    offset: int | None
    window: int | None
    samples: slice = slice(None)


def runs_of(lengths: Sequence[int], chunks: Sequence[int], chunk: int) -> Runs:
    """Where documents of these lengths lie in the chunks with these numbers, which are there one behind the other.

    A document that goes on in both chunks of a rank is the last of the one and the first of the other: so its tokens
    are neighbours there.
    """
    runs: dict[int, slice] = {}
    stop = 0
    for document, length in enumerate(lengths):
        start, stop = stop, stop + length
        for place, number in enumerate(chunks):
            begin, end = max(start, number * chunk), min(stop, (number + 1) * chunk)
            if begin < end:
                moved = (place - number) * chunk
                first = runs[document].start if document in runs else begin + moved
                runs[document] = slice(first, end + moved)
    return runs


def inside_documents(blocks: Sequence[Block], queries: Sequence[Runs], keys: Sequence[Runs]) -> list[Block]:
    """The parts of blocks in which a query and a key are of one document. queries, keys: the documents of each sample.

    Of two chunks at most one document has tokens in both, so there are hardly more parts than documents, and none needs
    a mask for its document.
    """
    return [
        part
        for block in blocks
        for sample, (mine, theirs) in enumerate(zip(queries, keys, strict=True))
        for document in mine
        if document in theirs
        and (part := _inside(block, mine[document], theirs[document], slice(sample, sample + 1))) is not None
    ]


def _inside(block: Block, queries: slice, keys: slice, samples: slice) -> Block | None:
    """The part of a block in which both lie, without queries that see no key of it, and keys that no query sees."""
    first, last = max(block.queries.start, queries.start), min(block.queries.stop, queries.stop)
    start, stop = max(block.keys.start, keys.start), min(block.keys.stop, keys.stop)
    if first >= last or start >= stop or block.offset is None:
        part = Block(slice(first, last), slice(start, stop), None, None, samples)
        return part if first < last and start < stop else None
    offset = block.offset + (first - block.queries.start) - (start - block.keys.start)
    stop = min(stop, start + offset + last - first)
    early = max(0, -offset)
    first, offset = first + early, offset + early
    if block.window is not None:
        far = max(0, offset - block.window + 1)
        start, offset = start + far, offset - far
        last = min(last, first + block.window + stop - start - 1 - offset)
    if first >= last or start >= stop:
        return None
    window = block.window if block.window is not None and offset + last - first - 1 >= block.window else None
    everything = window is None and offset >= stop - start - 1
    return Block(slice(first, last), slice(start, stop), None if everything else offset, window, samples)


def ring_blocks(rank: int, source: int, size: int, chunk: int, window: int | None) -> list[Block]:
    """The blocks of rank `source`'s keys that `rank` attends; both as places in the ranks' own [2 * chunk] tokens."""
    if window is None or window >= 2 * size * chunk:
        whole, first, second = slice(0, 2 * chunk), slice(0, chunk), slice(chunk, 2 * chunk)
        if source == rank:
            # The second chunk comes after the first, so causality is that of the places.
            return [Block(whole, whole, 0, None)]
        if source < rank:
            return [Block(whole, first, None, None)]
        return [Block(second, whole, None, None)]
    # Later keys first: a query's own come before all others.
    pairs = [(half, other) for half in (0, 1) for other in (1, 0)]
    return _chunk_pairs(rank, source, size, chunk, window, pairs)


def own_blocks(rank: int, size: int, chunk: int, window: int | None) -> list[Block]:
    """The blocks of its own keys that `rank` attends; places in its own [2 * chunk] tokens."""
    return ring_blocks(rank, rank, size, chunk, window)


def own_in_two(rank: int, size: int, chunk: int, window: int | None) -> tuple[list[Block], list[Block]]:
    """The same in two parts of equal work: the second chunk's queries with the first one's keys, each chunk with
    itself."""
    window = window or 2 * size * chunk
    apart, same = (_chunk_pairs(rank, rank, size, chunk, window, pairs) for pairs in ([(1, 0)], [(0, 0), (1, 1)]))
    return apart, same


def other_blocks(rank: int, size: int, chunk: int, window: int | None) -> list[Block]:
    """The blocks of all other keys that `rank` attends: queries numbered in its own tokens, keys in the sequence."""
    first, second = chunks_of(rank, size)
    before, between = slice(0, first * chunk), slice((first + 1) * chunk, second * chunk)
    if window is None or window >= 2 * size * chunk:
        blocks = [Block(slice(0, 2 * chunk), before, None, None), Block(slice(chunk, 2 * chunk), between, None, None)]
        return [block for block in blocks if block.keys.start < block.keys.stop]
    return [
        block
        for half, number, keys in ((0, first, before), (1, second, before), (1, second, between))
        if (block := _reached(half * chunk, number * chunk, chunk, keys, window)) is not None
    ]


def _reached(place: int, begin: int, chunk: int, keys: slice, window: int) -> Block | None:
    """The earlier `keys` that a window shows a chunk of queries; it starts at `place` here, at `begin` in the
    sequence."""
    queries = min(chunk, window - 1 - (begin - keys.stop))  # as many from the front see the last key
    start = max(keys.start, begin - window + 1)  # the first key that the first query sees
    if queries <= 0 or start >= keys.stop:
        return None
    offset = begin - start
    partly_hidden = offset + queries - 1 >= window  # not every query sees every key
    cut = slice(place, place + queries), slice(start, keys.stop)
    return Block(*cut, offset, window) if partly_hidden else Block(*cut, None, None)


def _chunk_pairs(
    rank: int, source: int, size: int, chunk: int, window: int, pairs: list[tuple[int, int]]
) -> list[Block]:
    """Blocks of (chunk of `rank`'s queries, chunk of `source`'s keys): 0 the earlier, 1 the later."""
    mine, theirs = chunks_of(rank, size), chunks_of(source, size)
    return [
        block
        for half, other in pairs
        if (block := _in_window(half * chunk, other * chunk, mine[half] - theirs[other], chunk, window)) is not None
    ]


def _in_window(query: int, key: int, apart: int, chunk: int, window: int) -> Block | None:
    """The part of a pair of chunks that a window leaves. They begin at `query` and `key`, and are `apart` chunks
    apart."""
    distance = apart * chunk
    reached = min(chunk, window + chunk - 1 - distance)  # as many queries from the front as keys from the back
    if apart < 0 or reached <= 0:
        return None
    skipped = chunk - reached
    queries, keys = slice(query, query + reached), slice(key + skipped, key + chunk)
    offset = distance - skipped
    if apart > 0 and offset + reached - 1 < window:
        return Block(queries, keys, None, None)
    return Block(queries, keys, offset, window if offset + reached - 1 >= window else None)
