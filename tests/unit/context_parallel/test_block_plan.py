"""The blocks of all ranks together are the causal mask, each pair once, and no rank has more than another."""

import pytest
import torch

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import Block, other_blocks, own_blocks, own_in_two, ring_blocks
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
    """FlashAttention counts keys left and right of the place that is as far from the end as the query is from its own."""
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
