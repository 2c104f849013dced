import itertools
import random

import pytest
import torch

from megatron.base.box import Box, first_hole, first_overlap, flat_boxes, intersect, subtract
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor, check_tiling, flat_slice


def elements(box):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape))))


def random_box(rng, dims):
    return Box(tuple(rng.randrange(4) for _ in range(dims)), tuple(rng.randrange(1, 4) for _ in range(dims)))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_intersection_and_difference_are_those_of_the_element_sets(dims):
    rng = random.Random(dims)
    for _ in range(200):
        a, b = random_box(rng, dims), random_box(rng, dims)
        common = intersect(a, b)
        assert (elements(common) if common else set()) == elements(a) & elements(b)
        rest = subtract(a, b)
        assert set().union(*map(elements, rest)) == elements(a) - elements(b)
        assert sum(box.numel for box in rest) == len(elements(a) - elements(b))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_first_overlap_finds_one_exactly_when_there_is_one(dims):
    rng = random.Random(10 + dims)
    found = 0
    for _ in range(300):
        boxes = [Box(b.offset, tuple(1 for _ in b.shape)) for b in (random_box(rng, dims) for _ in range(3))]
        sets = [elements(box) for box in boxes]
        shared = set().union(*(a & b for a, b in itertools.combinations(sets, 2)))
        overlap = first_overlap(boxes)
        assert (overlap is not None) == bool(shared)
        if overlap:
            found += 1
            assert elements(overlap) <= shared
    assert 0 < found < 300


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_flat_boxes_hold_the_slice_in_order(shape):
    total = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(total.numel() + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        read = [total[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape))].reshape(-1) for b in boxes]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *read]).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_slices_of_a_shard_are_views_that_tile_it():
    shape, offset, global_shape = (3, 5), (0, 5), (3, 10)
    data = torch.arange(15.0)
    pieces = [
        piece
        for start in (0, 7, 14)
        for piece in flat_slice(
            "w",
            data[start : start + 7],
            start=start,
            shape=shape,
            global_shape=global_shape,
            offset=offset,
            writer=True,
        )
    ]
    check_tiling("w", global_shape, [p.box for p in pieces] + [Box((0, 0), (3, 5))])
    rebuilt = torch.zeros(global_shape)
    for piece in pieces:
        assert piece.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        (r, c), (h, w) = piece.offset, piece.data.shape
        rebuilt[r : r + h, c : c + w] = piece.data
    assert torch.equal(rebuilt[:, 5:], data.reshape(3, 5))


def test_a_hole_and_an_overlap_name_the_tensor_and_the_range():
    with pytest.raises(CheckpointError, match=r"layer\.w \[4, 4\]: no rank writes elements \[2:4, 0:2\]"):
        check_tiling("layer.w", (4, 4), [Box((0, 0), (2, 4)), Box((2, 2), (2, 2))])
    with pytest.raises(CheckpointError, match=r"layer\.w \[4, 4\]: elements \[1:2, 0:4\] would be written twice"):
        check_tiling("layer.w", (4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (3, 4))])
    with pytest.raises(CheckpointError, match="twice"):
        check_tiling("step", (), [Box((), ()), Box((), ())])
    with pytest.raises(CheckpointError, match="no rank writes"):
        check_tiling("step", (), [])
    check_tiling("nothing", (0, 4), [])
    assert first_hole((0, 4), []) is None


def test_a_piece_outside_its_tensor_is_refused():
    with pytest.raises(AssertionError, match=r"w: piece \[2, 3\] at \(3, 0\) is not inside \(4, 3\)"):
        ShardedTensor("w", torch.zeros(2, 3), (4, 3), (3, 0), True)
