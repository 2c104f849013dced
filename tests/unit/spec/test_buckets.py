"""The plan of buckets and their slices: pure arithmetic, for any number of shards."""

import itertools

import pytest

from megatron.spec.buckets import ALIGN, default_bucket_size, owned_pieces, plan_buckets, round_up

NUMELS = {"a": 1, "b": 63, "c": 64, "d": 65, "e": 1000, "f": 7, "g": 128, "h": 4097, "i": 2}
SIZES = [1, 64, 100, 1000, 10**9]
SHARDS = range(1, 9)


class TestPlan:
    @pytest.mark.parametrize("shards", SHARDS)
    @pytest.mark.parametrize("bucket_size", SIZES)
    def test_properties(self, shards, bucket_size):
        layouts = plan_buckets(NUMELS, bucket_size, shards)
        held = [name for layout in layouts for name in layout.offsets]
        assert held == list(NUMELS), "each once, in order"
        for layout in layouts:
            assert layout.numels == {name: NUMELS[name] for name in layout.offsets} and layout.numels
            assert layout.size % (ALIGN * shards) == 0
            used = 0
            for name, offset in layout.offsets.items():
                assert offset % ALIGN == 0 and used <= offset < used + ALIGN
                used = offset + NUMELS[name]
            assert layout.size - ALIGN * shards < used <= layout.size, "padded by less than one step"
        for layout in layouts[:-1]:
            *_, last = layout.offsets.values()
            assert last < bucket_size, "closed as soon as it is large enough"
            assert round_up(last + NUMELS[list(layout.offsets)[-1]], ALIGN) >= bucket_size

    def test_sizes(self):
        assert len(plan_buckets(NUMELS, 1, 4)) == len(NUMELS)
        assert len(plan_buckets(NUMELS, 10**9, 4)) == 1
        assert plan_buckets({}, 100, 4) == []

    def test_by_hand(self):
        first, second = plan_buckets({"a": 100, "b": 30, "c": 10}, 120, 3)
        assert (first.offsets, first.numels, first.size) == ({"a": 0}, {"a": 100}, 192)
        assert (second.offsets, second.size) == ({"b": 0, "c": 64}, 192)
        (whole,) = plan_buckets({"a": 100, "b": 30, "c": 10}, 200, 3)
        assert (whole.offsets, whole.size) == ({"a": 0, "b": 128, "c": 192}, 384)


class TestPieces:
    @pytest.mark.parametrize("shards", SHARDS)
    @pytest.mark.parametrize("bucket_size", SIZES)
    def test_ranks_own_every_element_once(self, shards, bucket_size):
        owned = {name: [] for name in NUMELS}
        for layout in plan_buckets(NUMELS, bucket_size, shards):
            slice_size = layout.size // shards
            for rank in range(shards):
                end = 0
                for piece in owned_pieces(layout, rank, shards):
                    assert piece.start < piece.stop <= NUMELS[piece.name]
                    assert piece.at == rank_offset(layout, piece) - rank * slice_size, "where it is in the bucket"
                    assert end <= piece.at and piece.at % ALIGN == 0, "in order, apart, on whole rows"
                    end = piece.at + piece.stop - piece.start
                    owned[piece.name] += range(piece.start, piece.stop)
                assert end <= slice_size
        assert owned == {name: list(range(numel)) for name, numel in NUMELS.items()}

    def test_by_hand(self):
        """Slices of 192: a whole, then the end of the bucket's only large parameter; the last holds padding alone."""
        (layout,) = plan_buckets({"a": 70, "b": 150}, 10**6, 3)
        assert layout.size == 384
        found = [[(p.name, p.start, p.stop, p.at) for p in owned_pieces(layout, rank, 3)] for rank in range(3)]
        assert found == [[("a", 0, 70, 0)], [("b", 0, 128, 0)], [("b", 128, 150, 0)]]
        (small,) = plan_buckets({"a": 3}, 10**6, 3)
        assert [len(owned_pieces(small, rank, 3)) for rank in range(3)] == [1, 0, 0], "a rank may own nothing"


def rank_offset(layout, piece):
    """Where the piece starts in the bucket."""
    return layout.offsets[piece.name] + piece.start


class TestDefaultSize:
    def test_large_models_have_large_buckets(self):
        assert default_bucket_size(10**10, 1) == default_bucket_size(10**10, 40) == 40_000_000
        assert default_bucket_size(10**10, 64) == 64_000_000, "a million elements a rank"

    @pytest.mark.parametrize(("numel", "shards"), itertools.product([64_000, 10**6, 17 * 10**6, 10**8], SHARDS))
    def test_small_models_have_several(self, numel, shards):
        size = default_bucket_size(numel, shards)
        parts = {str(n): numel // 100 for n in range(100)}
        assert 4 <= len(plan_buckets(parts, size, shards)) <= 8

    def test_never_below_one(self):
        assert default_bucket_size(1, 8) == 1


@pytest.mark.parametrize(("n", "step", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 3, 9)])
def test_round_up(n, step, expected):
    assert round_up(n, step) == expected
