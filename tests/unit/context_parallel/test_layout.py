"""Which tokens a rank holds: all of them once, the same work for all, and orders that undo each other."""

import pytest
import torch

from megatron.core.context_parallel import layout

SIZES = [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("size", SIZES)
def test_chunks(size):
    held = [layout.chunks_of(rank, size) for rank in range(size)]
    assert sorted(number for chunks in held for number in chunks) == list(range(2 * size))
    assert {sum(chunks) for chunks in held} == {2 * size - 1}, "as many chunks before them on every rank"


def test_in_words():
    """0 1 2 3 | 3 2 1 0"""
    owners = [rank for number in range(8) for rank in range(4) if number in layout.chunks_of(rank, 4)]
    assert owners == [0, 1, 2, 3, 3, 2, 1, 0]
    assert layout.take(torch.arange(16), 0, 1, 4).tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_and_orders(size, dim):
    x = torch.arange(3 * 240 * 2).view(3, 240, 2).movedim(1, dim)
    parts = [layout.take(x, dim, rank, size) for rank in range(size)]
    in_rank_order = torch.cat(parts, dim)
    assert layout.to_natural_order(in_rank_order, dim, size).equal(x)
    assert layout.to_rank_order(x, dim, size).equal(in_rank_order)
    for rank, mine in enumerate(parts):
        places = layout.take(torch.arange(240), 0, rank, size)
        assert mine.equal(x.index_select(dim, places))
        assert places.equal(places.sort().values), "in the sequence's order"


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 3), (4, 2), (3, 1), (1, 3)])
def test_cuts_nest(inner, outer):
    """Neighbours together hold what one rank of fewer holds: so an all-to-all may join them before a ring."""
    size = inner * outer
    x = torch.arange(2 * size * 5)
    for run in range(outer):
        parts = [layout.take(x, 0, run * inner + place, size) for place in range(inner)]
        assert layout.to_natural_order(torch.cat(parts), 0, inner).equal(layout.take(x, 0, run, outer))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 7, 240])
def test_padding(size, length):
    x = torch.arange(2 * length).view(2, length) + 1
    padded = layout.pad(x, 1, size, value=-1)
    assert len(padded) == 2 and padded.shape[1] % (2 * size) == 0 and 0 <= padded.shape[1] - length < 2 * size
    assert padded[:, :length].equal(x) and padded[:, length:].eq(-1).all()
    assert layout.pad(x.t(), 0, size, value=-1).equal(padded.t())
    assert layout.pad(x, -1, size, value=-1).equal(padded)


def test_a_length_that_does_not_fit():
    with pytest.raises(AssertionError, match="10 tokens are not 2 x 4 equal chunks"):
        layout.take(torch.zeros(10), 0, 0, 4)
