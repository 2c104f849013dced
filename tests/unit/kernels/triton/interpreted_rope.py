"""The rotation in Triton's interpreter against its reference; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.kernels.backends.triton import rope
from megatron.kernels.ops import rope as reference
from tests.unit.kernels.close import random

# heads, channels, rotated channels
SHAPES = [(3, 16, 16), (1, 6, 6), (5, 20, 12), (20, 128, 128), (2, 2, 2)]


def tables(s, b, rotated):
    angles = random(s, b, 1, rotated // 2, seed=9)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(("heads", "d", "rotated"), SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [(1, 1), (3, 1), (3, 3)])
def test_parity(heads, d, rotated, interleaved, batch):
    b, of_tables = batch
    x, (cos, sin) = random(5, b, heads, d), tables(5, of_tables, rotated)
    found, expected = (rotate(x, cos, sin, interleaved) for rotate in (rope.rotate_once, reference.rotate_once))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_transpose(interleaved):
    """Backward: <R x, y> = <x, R' y>, with R' the rotation by the opposite angles."""
    x, y, (cos, sin) = random(4, 2, 3, 10), random(4, 2, 3, 10, seed=1), tables(4, 1, 8)
    there = (rope.rotate_once(x, cos, sin, interleaved) * y).sum()
    back = (x * rope.rotate_once(y, cos, -sin, interleaved)).sum()
    torch.testing.assert_close(there, back)


def test_keys_inside_the_projection_and_other_strides():
    cos, sin = tables(5, 1, 16)
    for x in (random(5, 2, 3, 6, 16)[:, :, :, -2], random(16, 5, 3, 2).permute(1, 3, 2, 0)):
        found = rope.rotate_once(x, cos, sin, False)
        torch.testing.assert_close(found, reference.rotate_once(x, cos, sin, False), rtol=0.0, atol=1e-6)
        assert found.is_contiguous()


def test_no_tokens():
    cos, sin = tables(0, 1, 8)
    assert rope.rotate_once(random(0, 2, 3, 8), cos, sin, False).shape == (0, 2, 3, 8)
