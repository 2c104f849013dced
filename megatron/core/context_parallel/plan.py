"""Which blocks of queries and keys a rank has to attend, under the balanced layout (see `layout`). Pure arithmetic.

Blocks that no query sees are not there; keys and queries that a window leaves out are cut off. So every query of a block
sees a key of it (segments aside), and the first block of a query holds its own key.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.context_parallel.layout import chunks_of


class Block(NamedTuple):
    """Attention of `queries` to `keys`, both runs of neighbouring positions. `offset`, `window`: see `Rule`."""

    queries: slice
    keys: slice
    offset: int | None
    window: int | None


def ring_blocks(rank: int, source: int, size: int, chunk: int, window: int | None) -> list[Block]:
    """What `rank` attends of the keys of rank `source`; both as places in the ranks' own [2 * chunk] tokens."""
    if window is None or window >= 2 * size * chunk:
        whole, first, second = slice(0, 2 * chunk), slice(0, chunk), slice(chunk, 2 * chunk)
        if source == rank:
            # The second chunk comes after the first, so causality is that of the places.
            return [Block(whole, whole, 0, None)]
        if source < rank:
            return [Block(whole, first, None, None)]
        return [Block(second, whole, None, None)]
    return [
        block
        for half, mine in enumerate(chunks_of(rank, size))
        # Later keys first: a query's own come before all others.
        for other, theirs in reversed(list(enumerate(chunks_of(source, size))))
        if (block := _in_window(half * chunk, other * chunk, mine - theirs, chunk, window)) is not None
    ]


def prefix_blocks(rank: int, size: int, chunk: int, window: int | None) -> list[Block]:
    """What `rank` attends of the whole sequence: queries as places in its own tokens, keys as places in the sequence.

    One block for each of its chunks: the keys from the first that the window lets it see to the chunk's last.
    """
    blocks = []
    for half, number in enumerate(chunks_of(rank, size)):
        begin = number * chunk
        first = 0 if window is None else max(0, begin - window + 1)
        limit = None if window is None or window >= begin + chunk else window
        blocks.append(Block(slice(half * chunk, (half + 1) * chunk), slice(first, begin + chunk), begin - first, limit))
    return blocks


def _in_window(query: int, key: int, apart: int, chunk: int, window: int) -> Block | None:
    """The part of a pair of chunks that a window leaves. They begin at `query` and `key`, and are `apart` chunks apart."""
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
