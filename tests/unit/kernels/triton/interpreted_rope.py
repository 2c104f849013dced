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


# groups, queries of each, channels, rotated channels
SPLITS = [(1, 1, 16, 16), (2, 4, 6, 6), (3, 2, 20, 12), (8, 4, 128, 128), (5, 7, 2, 2)]


@pytest.mark.parametrize(("groups", "queries", "d", "rotated"), SPLITS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [(1, 1), (3, 1), (3, 3)])
def test_the_split_of_queries_keys_and_values(groups, queries, d, rotated, interleaved, batch):
    b, of_tables = batch
    qkv, (cos, sin) = random(5, b, groups, queries + 2, d), tables(5, of_tables, rotated)
    found, expected = (each.split(qkv, cos, sin, interleaved) for each in (rope, reference))
    assert all(each.is_contiguous() for each in found)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    grads = [random(*each.shape, seed=seed) for seed, each in enumerate(found)]
    joined, expected = (each.join(*grads, cos, sin, interleaved) for each in (rope, reference))
    assert joined.shape == qkv.shape
    torch.testing.assert_close(joined, expected, rtol=0.0, atol=1e-6)


def test_gradients_of_any_strides_are_joined():
    """Attention returns gradients in layouts of its own."""
    cos, sin = tables(6, 1, 16)
    q, k, v = random(16, 6, 6, 2).permute(2, 3, 1, 0), random(2, 3, 6, 16).permute(2, 0, 1, 3), random(6, 2, 3, 16)
    found, expected = (each.join(q, k, v, cos, sin, False) for each in (rope, reference))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


def test_autograd_of_the_split_is_that_of_its_parts():
    qkv, (cos, sin) = random(4, 2, 2, 5, 8).requires_grad_(), tables(4, 1, 8)
    kernel = reference.SplitRotation(rope.split, rope.join)
    q, k, v = reference.split_and_rotate(qkv, cos, sin, interleaved=False, kernel=kernel)
    ones = [random(*each.shape, seed=seed) for seed, each in enumerate((q, k, v))]
    (found,) = torch.autograd.grad((q, k, v), qkv, ones)
    q = reference.rotate(qkv[:, :, :, :-2].reshape(4, 2, -1, 8), cos, sin)
    k = reference.rotate(qkv[:, :, :, -2], cos, sin)
    (expected,) = torch.autograd.grad((q, k, qkv[:, :, :, -1]), qkv, ones)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


def test_a_split_of_no_tokens():
    cos, sin = tables(0, 1, 8)
    q, k, v = rope.split(random(0, 2, 3, 4, 8), cos, sin, False)
    assert (q.shape, k.shape, v.shape) == ((0, 2, 6, 8), (0, 2, 3, 8), (0, 2, 3, 8))
    assert rope.join(q, k, v, cos, sin, False).shape == (0, 2, 3, 4, 8)
