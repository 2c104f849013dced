"""Sums of pieces in rank order: bit for bit the same wherever they are taken."""

import pytest
import torch

from megatron.core.comm.pairwise import staging_like, sum_in_rank_order

EVERYWHERE = [(size, rank) for size in range(2, 8) for rank in range(size)]


def random_pieces(size, dtype, n=257):
    """Numbers of very different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(size)
    return [
        (torch.randn(n, generator=generator) * 10.0 ** torch.randint(-3, 4, (n,), generator=generator)).to(dtype)
        for _ in range(size)
    ]


def in_order(pieces):
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


@pytest.mark.parametrize(("size", "rank"), EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_place", [True, False])
def test_bit_for_bit(size, rank, dtype, in_place):
    pieces = random_pieces(size, dtype)
    expected, own = in_order(pieces), pieces[rank].clone()
    out = pieces[rank] if in_place else torch.full_like(pieces[rank], float("nan"))
    sum_in_rank_order(pieces, rank, out)
    assert out.equal(expected)
    assert in_place or pieces[rank].equal(own), "what this rank still sends to others is left alone"


def test_the_order_shows():
    """Else the tests above could not fail."""
    for size in range(3, 8):
        pieces = random_pieces(size, torch.float32)
        assert not in_order(pieces).equal(in_order(pieces[::-1]))


@pytest.mark.parametrize(("size", "rank"), EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, None])
def test_half_precision_is_added_in_fp32_and_rounded_once(size, rank, dtype, out_dtype):
    pieces = random_pieces(size, dtype)
    exact = in_order([piece.float() for piece in pieces])
    out = pieces[rank] if out_dtype is None else torch.empty(257, dtype=out_dtype)
    sum_in_rank_order(pieces, rank, out)
    assert out.equal(exact.to(out.dtype))


@pytest.mark.parametrize(("size", "rank"), EVERYWHERE)
def test_staging_is_memory_for_all_but_the_own_piece(size, rank):
    pieces = list(torch.zeros(size, 5).unbind())
    received = staging_like(pieces, rank)
    assert received[rank] is pieces[rank] and len(received) == size
    for r, memory in enumerate(received):
        memory.fill_(r + 1.0)
    for r, memory in enumerate(received):
        assert memory.is_contiguous() and memory.tolist() == [r + 1.0] * 5, "nobody's memory is another's"
    assert [float(piece[0]) for piece in pieces] == [rank + 1.0 if r == rank else 0.0 for r in range(size)]
