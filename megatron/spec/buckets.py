"""How parameters are laid out in buckets and shared between ranks: pure arithmetic.

[Note: layout of buckets] Parameters lie in the expected order of their gradients in backward: the reverse of
registration. A bucket is a run of whole parameters of at least `bucket_size` elements. It is padded to a multiple of 64
x shards and cut into equal slices; slice r belongs to shard r, so that reduce-scatter and all-gather of a bucket are in
place and of full size, for any number of shards. Every parameter starts on a multiple of 64 elements, too: cuBLAS and
vector units want aligned memory, and a norm taken over rows of 64 does not depend on the cut. Padding is always zero.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

ALIGN = 64
NORM_ROW = ALIGN  # elements that the gradient norm sums in fp32: buckets and their slices are whole rows
# Gradient memories in use at once when none is kept: one that backward writes, the others on the wire.
GRADIENT_BLOCKS = 4
IN_FLIGHT = 4  # buckets on the wire at once: enough to keep it busy, and a bound on staging memory
_FEW = 8


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter starts in a bucket, how long it is, and the bucket's padded size. In elements."""

    offsets: dict[str, int]
    numels: dict[str, int]
    size: int


@dataclass(frozen=True)
class Piece:
    """Elements start .. stop of a flattened parameter, which lie at `at` .. in a rank's slice of the bucket."""

    name: str
    start: int
    stop: int
    at: int


def cuts(numels: Sequence[int], bucket_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first parameter, the one behind the last, elements before padding) of each bucket of parameters of
    `numels` elements, in buffer order. See the note on layout."""
    ends = list(itertools.accumulate(round_up(numel, ALIGN) for numel in numels))
    first = start = 0
    while first < len(ends):
        stop = min(bisect.bisect_left(ends, start + bucket_size, first) + 1, len(ends))
        yield first, stop, ends[stop - 1] - start
        first, start = stop, ends[stop - 1]


def plan_buckets(numels: Mapping[str, int], bucket_size: int, shards: int) -> list[BucketLayout]:
    """Buckets for parameters in buffer order. See the note on layout."""
    layouts, names = [], list(numels)
    for first, stop, elements in cuts(list(numels.values()), bucket_size):
        held = {name: numels[name] for name in names[first:stop]}
        starts = itertools.accumulate((round_up(numel, ALIGN) for numel in held.values()), initial=0)
        layouts.append(BucketLayout(dict(zip(held, starts, strict=False)), held, round_up(elements, ALIGN * shards)))
    return layouts


def plan_all(
    numels: Mapping[str, int], kinds: Mapping[str, Hashable], bucket_size: int, shards: Mapping[str, int]
) -> list[BucketLayout]:
    """Buckets of one kind each, in the order in which backward completes them.

    numels: name -> elements, in buffer order. shards: name -> number of shards, equal for all parameters of one kind.
    """
    layouts: list[BucketLayout] = []
    for kind in dict.fromkeys(kinds.values()):
        chosen = {name: numel for name, numel in numels.items() if kinds[name] == kind}
        layouts += plan_buckets(chosen, bucket_size, shards[next(iter(chosen))])
    position = {name: number for number, name in enumerate(numels)}
    return sorted(layouts, key=lambda layout: max(position[name] for name in layout.offsets))


def owned_pieces(layout: BucketLayout, rank: int, shards: int) -> list[Piece]:
    """What lies in slice `rank` of the bucket, in order."""
    size = layout.size // shards
    first, last = rank * size, (rank + 1) * size
    pieces = []
    for name, offset in layout.offsets.items():
        start, stop = max(first, offset), min(last, offset + layout.numels[name])
        if start < stop:
            pieces.append(Piece(name, start - offset, stop - offset, start - first))
    return pieces


def default_bucket_size(numel: int, shards: int) -> int:
    """Large enough for the wire (40M, and 1M a rank), but a model of any size has some buckets to overlap."""
    return min(max(40_000_000, 1_000_000 * shards), -(-numel // _FEW))


def round_up(n: int, step: int) -> int:
    """The least multiple of `step` that is not below n."""
    return -(-n // step) * step
