"""Quantization in Triton's interpreter against its reference, bit for bit; run by tests/unit/kernels/test_triton.py.

The interpreter knows no FP8 numbers, so it runs the kernels as on GPUs without an instruction for the cast.
"""

import pytest
import torch

from megatron.kernels import choose_quantize, fused
from megatron.kernels.backends.triton import quantize
from megatron.kernels.ops.fp8 import quantize as reference
from megatron.kernels.ops.fp8.formats import E4M3, E5M2
from tests.unit.kernels.close import random

BLOCKS = [reference.VECTOR, reference.SQUARE, reference.MICRO]
SHAPES = [(5, 7), (130, 257), (128, 128), (1, 140)]
BOTH = {"rows": True, "columns": True}


def difficult(m, k, seed=0):
    """Magnitudes over many powers of two, with zeros and numbers that are not finite."""
    x = random(m, k, seed=seed) * torch.exp2(random(m, k, seed=seed + 1, scale=8.0).round())
    x.view(-1)[::7] = 0.0
    x.view(-1)[3::1001] = float("inf")
    x.view(-1)[4::1003] = float("nan")
    return x


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.block == b.block and (a.data.shape, a.data.dtype) == (b.data.shape, b.data.dtype)
        assert a.data.is_contiguous() and a.inverse.dtype == b.inverse.dtype
        assert a.inverse.float().equal(b.inverse.float())
        bits, their_bits = (
            torch.where(each.data.float().isnan(), 0x7F, each.data.view(torch.uint8)) for each in (a, b)
        )
        assert bits.equal(their_bits)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
class TestParity:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("block", BLOCKS)
    def test_per_block(self, block, shape, dtype):
        for x in (random(*shape), difficult(*shape)):
            expected = reference.per_block(x, block, dtype, **BOTH)
            assert_same_bits(quantize.per_block(x, block, dtype, **BOTH), expected)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_per_tensor(self, shape, dtype):
        for x in (random(*shape), difficult(*shape)):
            for value in (0.37, 300.0):
                scale = torch.tensor([value])
                assert_same_bits(
                    quantize.per_tensor(x, scale, dtype, **BOTH), reference.per_tensor(x, scale, dtype, **BOTH)
                )

    def test_every_power_and_tie(self, dtype):
        """All fp32 numbers whose first 16 bits vary, and those beside the middle between two numbers of the format."""
        high = torch.arange(1 << 16, dtype=torch.int32).mul_(1 << 16)
        x = torch.stack([(high + low).view(torch.float32) for low in (0, 1, -1)]).view(3 * 256, 256)
        scale = torch.ones(1)
        assert_same_bits(quantize.per_tensor(x, scale, dtype, **BOTH), reference.per_tensor(x, scale, dtype, **BOTH))


class TestMagnitude:
    @pytest.mark.parametrize("before", [0.0, 1e9])
    def test_is_raised(self, before):
        x, amax = random(130, 257), torch.tensor([before])
        quantize.per_tensor(x, torch.ones(1), E4M3, rows=True, columns=False, amax=amax)
        assert amax.item() == max(before, float(x.abs().max()))

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_shows_what_is_not_finite(self, value):
        x, amax = random(130, 257), torch.zeros(3)
        x[129, 3] = value
        quantize.per_tensor(x, torch.ones(1), E4M3, rows=True, columns=False, amax=amax[1:2])
        assert str(amax[1].item()) == str(value) and amax[0] == amax[2] == 0


class TestAmaxes:
    """A scale for the present values, in two launches."""

    @pytest.mark.parametrize("shape", [(5, 7), (130, 4100)])
    def test_the_largest_is_that_of_the_matrix(self, shape):
        """Several pieces, in one row or in each of several rows; fewer than programs."""
        x = random(*shape, dtype=torch.bfloat16)
        x[-1, -1] = -7.0
        found = quantize.amaxes(x)
        assert found.dtype == torch.float32 and found.max().item() == 7.0 and found.min() >= 0.0
        for part in (random(64, 300)[:, 100:230], random(3, 9000)[:, 100:8900]):
            assert quantize.amaxes(part).max() == part.abs().max()
        x[0, 3] = float("nan")
        assert quantize.amaxes(x).max().isnan()

    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_the_same_bits(self, dtype):
        x = random(70, 130, dtype=torch.bfloat16)
        # Of zeros, of numbers so small that the scale has a limit, and of numbers that are not finite.
        small, large = (x.float() * scale for scale in (1e-38, 1e38))
        for of, margin in (
            (x, 0),
            (x, 3),
            (x * 0.0, 0),
            (small, 3),
            (small * 1e-6, 0),
            (large, 3),
            (difficult(70, 130), 0),
        ):
            expected = reference.by_amaxes(of, reference.amax_of(of), dtype, margin, **BOTH)
            assert_same_bits(quantize.by_amaxes(of, quantize.amaxes(of), dtype, margin, **BOTH), expected)

    def test_the_amaxes_are_read(self):
        """Those of other ranks may be larger."""
        x = random(70, 130)
        amaxes = quantize.amaxes(x)
        amaxes[300] = 50.0
        expected = reference.by_amaxes(x, torch.tensor([50.0]), E4M3, 0, **BOTH)
        assert_same_bits(quantize.by_amaxes(x, amaxes, E4M3, 0, **BOTH), expected)


def test_only_what_is_asked_for():
    x = random(140, 70)
    for rows, columns in ((True, False), (False, True)):
        options = {"rows": rows, "columns": columns}
        for block in BLOCKS:
            expected = reference.per_block(x, block, E4M3, **options)
            assert_same_bits(quantize.per_block(x, block, E4M3, **options), expected)
        scale = torch.tensor([2.5])
        expected = reference.per_tensor(x, scale, E4M3, **options)
        assert_same_bits(quantize.per_tensor(x, scale, E4M3, **options), expected)


def test_any_strides():
    """Part of a wider matrix, and a transpose."""
    for x in (random(40, 300)[:, 100:230], random(200, 40).t()):
        expected = reference.per_block(x, reference.VECTOR, E4M3, **BOTH)
        assert_same_bits(quantize.per_block(x, reference.VECTOR, E4M3, **BOTH), expected)


def test_factors_of_vectors_are_read_in_place():
    """Products want neighbouring rows next to each other."""
    both = quantize.per_block(random(256, 384), reference.VECTOR, E4M3, **BOTH)
    assert both.rows.inverse.stride() == (1, 256) and both.columns.inverse.stride() == (1, 384)


class TestChoice:
    CPU = torch.device("cpu")

    def test_triton_is_taken(self, monkeypatch):
        monkeypatch.setattr(fused, "missing", lambda device: None)
        kernels, why = choose_quantize.choose_quantize(self.CPU)
        ours = quantize.per_tensor, quantize.per_block, quantize.amaxes, quantize.by_amaxes
        assert (kernels, why) == (ours, None)

    def test_a_kernel_that_fails_or_is_wrong_is_left_out(self, monkeypatch):
        def broken(*args, **options):
            raise ValueError("no such instruction\non this GPU")

        def wrong(x, *args, **options):
            return reference.per_block(x * 2, *args, **options)

        def wrong_scale(x, amaxes, *args, **options):
            return reference.by_amaxes(x, amaxes * 2, *args, **options)

        monkeypatch.setattr(fused, "missing", lambda device: None)
        ours = choose_quantize.load()
        for kernels, reason in (
            ({"per_block": broken}, "no such instruction"),
            ({"per_block": wrong}, "its results are wrong"),
            ({"by_amaxes": wrong_scale}, "its results are wrong"),
        ):
            chosen = ours._replace(**kernels)
            monkeypatch.setattr(choose_quantize, "load", lambda chosen=chosen: chosen)
            assert choose_quantize.choose_quantize(self.CPU) == (reference.SEPARATE, reason)

    def test_elsewhere(self):
        assert choose_quantize.choose_quantize(self.CPU) == (reference.SEPARATE, "the device is cpu")
