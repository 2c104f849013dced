"""RMSNorm and LayerNorm in Triton's interpreter against their references; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.kernels.backends.triton import norm
from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops import norm as reference
from tests.unit.kernels.close import random
from tests.unit.kernels.triton.near import assert_near

EPSILON = 1e-5
SHAPES = [
    ((5, 3), (33,)),
    ((300,), (16,)),
    ((4, 2), (3, 20)),
    ((1,), (3,)),
    ((0, 2), (8,)),
    ((3,), (8192,)),
    ((3,), (16384,)),
]


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
class TestParity:
    def test_rms_norm(self, rows, channels):
        x, weight, grad = random(*rows, *channels), random(*channels, seed=1), random(*rows, *channels, seed=2)
        out, rstd = norm.compute_rms_norm(x, weight, EPSILON)
        assert_near((out, rstd), reference.compute_rms_norm(x, weight, EPSILON))
        assert_near(norm.gradient_rms_norm(grad, x, weight, rstd), reference.gradient_rms_norm(grad, x, weight, rstd))

    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("ends", [False, True])
    def test_with_the_additions_of_a_residual_stream(self, rows, channels, centered, ends):
        """ends: nothing but the norm reads the sum."""
        if centered and (len(channels) > 1 or 0 in rows or channels[0] > norm.LARGEST_CENTERED):
            pytest.skip("LayerNorm has one dim of channels, and the operator behind its reference wants rows")
        x, branch, grad, residual = (random(*rows, *channels, seed=seed) for seed in range(4))
        weight, bias = random(*channels, seed=5), random(*channels, seed=6) if centered else None
        of_sum = None if ends else residual
        total, out, statistics = norm.compute_add_norm(x, branch, weight, bias, EPSILON)
        expected_total, expected, their_statistics = reference.compute_add_norm(x, branch, weight, bias, EPSILON)
        assert torch.equal(total, expected_total)
        assert_near((out, statistics[1]), (expected, their_statistics[1]))
        found = norm.gradient_add_norm(grad, of_sum, total, weight, bias, statistics)
        assert_near(found, reference.gradient_add_norm(grad, of_sum, total, weight, bias, their_statistics))

    @pytest.mark.parametrize("biased", [True, False])
    def test_layer_norm(self, rows, channels, biased):
        if len(channels) > 1:
            pytest.skip("LayerNorm has one dim of channels")
        x, weight, grad = random(*rows, *channels), random(*channels, seed=1), random(*rows, *channels, seed=2)
        bias = random(*channels, seed=3) if biased else None
        out, statistics = norm.compute_layer_norm(x, weight, bias, EPSILON)
        if x.numel() == 0:
            assert out.shape == x.shape and norm.gradient_layer_norm(grad, x, weight, bias, statistics)[1].eq(0).all()
            return
        expected, their_statistics = reference.compute_layer_norm(x, weight, bias, EPSILON)
        assert_near((out, *statistics), (expected, *their_statistics))
        found = norm.gradient_layer_norm(grad, x, weight, bias, statistics)
        assert_near(found, reference.gradient_layer_norm(grad, x, weight, bias, statistics))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_any_strides(order):
    x, grad, weight = random(6, 6, 6).permute(order), random(6, 6, 6, seed=3).permute(2, 0, 1), random(6, seed=1)
    out, rstd = norm.compute_rms_norm(x, weight, EPSILON)
    assert_near((out, rstd), reference.compute_rms_norm(x, weight, EPSILON))
    assert_near(norm.gradient_rms_norm(grad, x, weight, rstd), reference.gradient_rms_norm(grad, x, weight, rstd))


def test_keys_inside_the_projection_are_read_in_place():
    """The keys of all heads lie apart from each other, each head's in one piece."""
    keys, weight = random(5, 2, 3, 6, 16)[:, :, :, -2], random(16, seed=1)
    assert as_rows(keys, 16).data_ptr() == keys.data_ptr()
    assert_near(norm.compute_rms_norm(keys, weight, EPSILON), reference.compute_rms_norm(keys, weight, EPSILON))


@pytest.mark.parametrize("wide", [False, True])
def test_a_sum_takes_the_wider_dtype(wide):
    """A residual stream in fp32 and a branch in half precision; with a row that is too long for a program, too."""
    h = norm.LARGEST + 1 if wide else 32
    x, branch, weight = random(4, h), random(4, h, dtype=torch.float16, seed=1), random(h, dtype=torch.float16)
    total, out, statistics = norm.compute_add_norm(x, branch, weight, None, EPSILON)
    assert (total.dtype, out.dtype) == (torch.float32, torch.float16)
    assert torch.equal(total, x + branch)
    grad_x, _, _ = norm.gradient_add_norm(out, total, total, weight, None, statistics)
    assert grad_x.dtype == torch.float32


def test_programs_go_through_the_rows(monkeypatch):
    """Few programs here; a GPU has many, and only longer batches make them take several rows."""
    monkeypatch.setattr(norm, "WARPS", 8)
    x, weight, grad = random(900, 16), random(16, seed=1), random(900, 16, seed=2)
    _, rstd = norm.compute_rms_norm(x, weight, EPSILON)
    found = norm.gradient_rms_norm(grad, x, weight, rstd)
    assert_near(found, reference.gradient_rms_norm(grad, x, weight, rstd))
    assert torch.equal(found[1], norm.gradient_rms_norm(grad, x, weight, rstd)[1]), "the same bits each time"


def test_longer_rows_run_in_the_reference():
    x, weight = random(2, norm.LARGEST + 1), random(norm.LARGEST + 1, seed=1)
    for found, expected in zip(
        norm.compute_rms_norm(x, weight, EPSILON), reference.compute_rms_norm(x, weight, EPSILON), strict=True
    ):
        assert torch.equal(found, expected)
