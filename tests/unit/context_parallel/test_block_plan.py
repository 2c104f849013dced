"""The blocks of all ranks together are the causal mask, each pair once, and no rank has more than another."""

import itertools

import pytest
import torch

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import (
    Block,
    inside_documents,
    other_blocks,
    own_blocks,
    own_in_two,
    ring_blocks,
    runs_of,
)
from megatron.kernels.ops.attention import causal_mask
from megatron.kernels.ops.attention_lse_cuda import flash_takes
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores

SIZES = [1, 2, 3, 5]
CHUNKS = [1, 5]
WINDOWS = [None, 1, 4, 5, 6, 13, 1000]
CPU = torch.device("cpu")


def lengths(block):
    return block.queries.stop - block.queries.start, block.keys.stop - block.keys.start


def seen(block):
    """[queries, keys] of a block."""
    mask = Rule(Scores(1.0), block.offset, block.window).mask(*lengths(block), CPU)
    return torch.ones(lengths(block), dtype=torch.bool) if mask is None else mask


def ring(rank, size, chunk, window):
    """(block, places of its queries, places of its keys in the sequence), in the order they are attended."""
    places = [layout.take(torch.arange(2 * size * chunk), 0, r, size) for r in range(size)]
    sources = [(rank - step) % size for step in range(size)]
    return [
        (block, places[rank][block.queries], places[source][block.keys])
        for source in sources
        for block in ring_blocks(rank, source, size, chunk, window)
    ]


def gathered(rank, size, chunk, window):
    places = layout.take(torch.arange(2 * size * chunk), 0, rank, size)
    everywhere = torch.arange(2 * size * chunk)
    own = [(b, places[b.queries], places[b.keys]) for b in own_blocks(rank, size, chunk, window)]
    return own + [(b, places[b.queries], everywhere[b.keys]) for b in other_blocks(rank, size, chunk, window)]


PLANS = pytest.mark.parametrize("plan", [ring, gathered])


@PLANS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_together_they_are_the_mask(plan, size, chunk, window):
    length = 2 * size * chunk
    times = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(size):
        for block, queries, keys in plan(rank, size, chunk, window):
            visible, own = seen(block), queries[:, None] == keys[None, :]
            # What the merge relies on: no query of a block is blind, and its first block holds its own key.
            assert visible.any(dim=1).all()
            assert (times[queries].any(dim=1) | (visible & own).any(dim=1)).all()
            times[queries[:, None], keys[None, :]] += visible
    assert times.equal(causal_mask(length, length, None, window, CPU).long())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_own_keys_in_two(size, window):
    """Together what they are in one, and without a window about as much work each."""
    for rank in range(size):
        places = layout.take(torch.arange(10 * size), 0, rank, size)
        times, counts = torch.zeros(10, 10, dtype=torch.int64), []
        for part in own_in_two(rank, size, 5, window):
            counts.append(sum(int(seen(block).sum()) for block in part))
            for block in part:
                assert seen(block).any(dim=1).all()
                times[block.queries, block.keys] += seen(block)
        whole = causal_mask(10 * size, 10 * size, None, window, CPU)[places[:, None], places[None, :]]
        assert times.equal(whole.long())
        if window is None:
            assert counts == [25, 30]


@PLANS
@pytest.mark.parametrize("size", SIZES)
def test_equal_work(plan, size):
    pairs = [sum(int(seen(b).sum()) for b, _, _ in plan(rank, size, 50, None)) for rank in range(size)]
    assert len(set(pairs)) == 1 and sum(pairs) == 100 * size * (100 * size + 1) // 2
    # What is multiplied, masked pairs included, is at most the square of a rank's own chunks more.
    computed = [sum(n * t for n, t in (lengths(b) for b, _, _ in plan(rank, size, 50, None))) for rank in range(size)]
    assert max(computed) <= 1.01 * min(computed)
    assert max(computed) - pairs[0] < 100**2 / 2


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_equal_work_at_every_step(size):
    """So nobody waits for a neighbour: half of the pairs of a whole part after the first step."""
    for rank in range(size):
        for source in range(size):
            pairs = sum(int(seen(b).sum()) for b in ring_blocks(rank, source, size, 50, None))
            assert pairs == (100 * 101 // 2 if source == rank else 100 * 100 // 2)


@PLANS
def test_a_window_bounds_the_work(plan):
    """A chunk's queries and keys that are too far apart are cut off, and blocks of them are not there."""
    chunk, window = 64, 16
    for rank in range(4):
        computed = sum(n * t for n, t in (lengths(b) for b, _, _ in plan(rank, 4, chunk, window)))
        assert computed <= 2 * chunk * (chunk + window)
    assert ring_blocks(3, 1, 4, chunk, window) == []
    # The first 15 queries of chunk 2 see the last 15 keys of chunk 1; chunk 5 those of chunk 4 by way of rank 3.
    assert ring_blocks(2, 1, 4, chunk, window)[0] == Block(slice(0, 15), slice(49, 64), 15, 16)


@PLANS
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_flash_says_the_same(plan, size, chunk, window):
    """FlashAttention counts keys left and right of the place that is as far from the end as the query is from its
    own."""
    for rank in range(size):
        for block, _, _ in plan(rank, size, chunk, window):
            s, t = lengths(block)
            rule = Rule(Scores(1.0), block.offset, block.window)
            assert flash_takes(torch.empty(s, 1, 1, 8), torch.empty(t, 1, 1, 8), rule)
            if rule.offset is None:
                continue
            left, right = rule.reach(s, t)
            place, key = torch.arange(s)[:, None] + t - s, torch.arange(t)[None, :]
            reached = key <= place + right if right < t else torch.ones(s, t, dtype=torch.bool)
            if left is not None and left < t:
                reached = reached & (key >= place - left)
            assert reached.equal(seen(block))


# Lengths of documents in chunks of 5, of 1, 2 and 3 ranks: over several chunks, of one token, ends at ends of chunks.
DOCUMENTS = {
    1: [(10,), (1, 8, 1), (5, 5), (1,) * 10],
    2: [(20,), (1, 3, 1, 9, 6), (15, 5), (1,) * 20, (4, 12, 4)],
    3: [(30,), (1, 3, 1, 1, 17, 2, 5), (14, 1, 15), (1,) * 30, (7, 16, 7)],
}


def with_documents(plan, rank, size, samples, window):
    """(block, places of its queries, places of its keys in the sequence): the parts of `plan` inside documents."""
    chunk, everywhere = 5, torch.arange(10 * size)
    places = [layout.take(everywhere, 0, r, size) for r in range(size)]

    def runs(chunks):
        return [runs_of(lengths, chunks, chunk) for lengths in samples]

    parts = [(source, ring_blocks(rank, source, size, chunk, window)) for source in range(size)]
    if plan is gathered:
        parts = [(rank, own_blocks(rank, size, chunk, window)), (None, other_blocks(rank, size, chunk, window))]
    found = []
    for source, blocks in parts:
        keys = everywhere if source is None else places[source]
        theirs = range(2 * size) if source is None else layout.chunks_of(source, size)
        for block in inside_documents(blocks, runs(layout.chunks_of(rank, size)), runs(theirs)):
            found.append((block, places[rank][block.queries], keys[block.keys]))
    return found


@PLANS
@pytest.mark.parametrize("size", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 4, 6, 13, 1000])
def test_documents_need_no_mask(plan, size, window):
    """Together they are the mask of documents, and FlashAttention can be told each."""
    samples, length = DOCUMENTS[size], 10 * size
    times = torch.zeros(len(samples), length, length, dtype=torch.int64)
    for rank in range(size):
        for block, queries, keys in with_documents(plan, rank, size, samples, window):
            visible, (s, t) = seen(block), lengths(block)
            assert visible.any(dim=1).all(), "no query is blind"
            assert Rule(Scores(1.0), block.offset, block.window).in_reach(s, t)
            times[block.samples.start, queries[:, None], keys[None, :]] += visible
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in samples])
    assert times.equal(causal_mask(length, length, ids, window, CPU).squeeze(1).long())


@pytest.mark.parametrize("plan", [ring, gathered])
def test_documents_save_work(plan):
    """Pairs of different documents are not computed: hardly more parts than documents, as many products as pairs."""
    everything = with_documents(plan, 1, 3, [(30,)], None)
    parts = with_documents(plan, 1, 3, [(3,) * 10], None)
    assert len(parts) == 8 and sum(s * t for s, t in (lengths(b) for b, _, _ in parts)) < 40
    assert sum(s * t for s, t in (lengths(b) for b, _, _ in everything)) > 150


def test_reach_of_flash():
    """It takes t keys or more on a side for all: a rule is in reach only if they are."""
    for s, t, offset, window in itertools.product(range(1, 6), range(1, 6), range(6), [None, 1, 2, 3, 5, 9]):
        rule = Rule(Scores(1.0), offset, window)
        left, right = rule.reach(s, t)
        place, key = torch.arange(s)[:, None] + t - s, torch.arange(t)[None, :]
        told = (key <= place + right) | (right >= t)
        if left is not None:
            told = told & ((key >= place - left) | (left >= t))
        if rule.in_reach(s, t):
            assert told.equal(rule.mask(s, t, CPU)), (s, t, offset, window)
