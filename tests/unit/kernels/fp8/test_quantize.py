"""Quantization bit for bit against numpy: the casts, the scales, and the blocks of both directions."""

import numpy as np
import pytest
import torch

from megatron.kernels.ops.fp8 import quantize as q
from megatron.kernels.ops.fp8.formats import E4M3, E5M2, LARGEST_SCALE, largest
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8 import in_numpy

FORMATS = [E4M3, E5M2]
ONE = torch.ones(1)


def bits(x):
    """Bytes of FP8 numbers; the sign of NaN does not count."""
    return torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8)).numpy()


def assert_quantized(found, x, block, dtype):
    """`found` is x quantized in blocks, bit for bit."""
    scales = in_numpy.block_scales(x.float().numpy(), block, dtype)
    assert found.data.shape == x.shape and found.data.is_contiguous()
    np.testing.assert_array_equal(found.inverse.float().numpy(), 1.0 / scales)
    expected = in_numpy.quantize(x.float().numpy(), in_numpy.expand(scales, block, x.shape), dtype)
    np.testing.assert_array_equal(bits(found.data), expected)


def difficult(m, k, seed=0):
    """Magnitudes over many powers of two, with zeros, ties and numbers next to the limits of formats."""
    x = random(m, k, seed=seed) * torch.exp2(random(m, k, seed=seed + 1, scale=12.0).round())
    x.view(-1)[::7] = 0.0
    x.view(-1)[1::11] = -(2.0**-10)
    x.view(-1)[2::13] = 464.0
    return x


@pytest.mark.parametrize("dtype", FORMATS)
class TestCast:
    def test_every_bf16_number(self, dtype):
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).view(1, -1)
        found = q.cast(every, ONE, dtype)
        np.testing.assert_array_equal(bits(found), in_numpy.quantize(every.float().numpy(), np.float32(1.0), dtype))

    def test_ties_and_their_neighbours(self, dtype):
        """Between each two numbers of the format: the middle, and the fp32 numbers beside it."""
        finite = torch.arange(0, 0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8).view(dtype).float()
        middle = (finite[:-1] + finite[1:]) / 2
        around = (middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9)))
        x = torch.cat([finite, *around]).view(1, -1)
        x = torch.cat([x, -x])
        np.testing.assert_array_equal(bits(q.cast(x, ONE, dtype)), in_numpy.cast(x.numpy(), dtype))

    def test_saturates_but_hides_no_overflow(self, dtype):
        x = torch.tensor([[1e30, -1e30, float("inf"), -float("inf"), float("nan"), 3.0]])
        found = q.cast(x, torch.full((1,), 2.0**100), dtype).float()
        assert found[0, :2].tolist() == [largest(dtype), -largest(dtype)] and found[0, 5] == largest(dtype)
        assert found[0, 2:5].isnan().all()


class TestScales:
    def test_scale_of(self):
        amax = torch.tensor([1.0, 3.7, 448.0, 1e-30, 1e-45, 3e38, 0.0, float("inf"), float("nan")])
        for margin in (0, 3):
            found = q.scale_of(amax, 448.0, margin)
            np.testing.assert_array_equal(found.numpy(), in_numpy.scale_of(amax.numpy(), 448.0, margin))
        assert found[-3:].tolist() == [1.0, 1.0, 1.0] and found[4] == LARGEST_SCALE

    def test_of_many_cells_that_keep_what_they_had(self):
        amax, old = torch.tensor([2.0, 0.0, float("nan"), 4.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
        most = torch.tensor([448.0, 448.0, 57344.0, 57344.0])
        assert q.scale_of(amax, most, 0, old).tolist() == [224.0, 6.0, 7.0, 14336.0]

    def test_amax_sees_what_is_not_finite(self):
        assert q.amax_of(torch.tensor([[1.0, -5.0]])).tolist() == [5.0]
        assert q.amax_of(torch.tensor([[1.0, float("nan"), float("inf")]])).isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(5, 7), (130, 257), (1, 1)])
class TestBothDirections:
    def test_per_tensor(self, shape, dtype):
        x, scale, amax = difficult(*shape), torch.tensor([0.37]), torch.tensor([0.25])
        both = q.per_tensor(x, scale, dtype, rows=True, columns=True, amax=amax)
        expected = in_numpy.quantize(x.numpy(), scale.numpy(), dtype)
        np.testing.assert_array_equal(bits(both.rows.data), expected)
        np.testing.assert_array_equal(bits(both.columns.data), expected.T)
        assert both.columns.data.is_contiguous() and amax.item() == max(0.25, float(x.abs().max()))
        assert all(each.inverse.tolist() == scale.reciprocal().tolist() and each.block is None for each in both)

    @pytest.mark.parametrize("block", [q.VECTOR, q.SQUARE, q.MICRO])
    def test_per_block(self, block, shape, dtype):
        for x in (difficult(*shape), difficult(*shape).bfloat16()):
            both = q.per_block(x, block, dtype, rows=True, columns=True)
            assert_quantized(both.rows, x, block, dtype)
            assert_quantized(both.columns, x.t(), block, dtype)
            assert all(each.block == block for each in both)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_scale_of_the_largest_of_several_amaxes(dtype):
    x, amaxes = difficult(5, 7), torch.tensor([0.5, 3.7, 0.0])
    found = q.by_amaxes(x, amaxes, dtype, 2, rows=True, columns=True)
    scale = in_numpy.scale_of(np.array([3.7], np.float32), largest(dtype), 2)
    assert found.rows.inverse.tolist() == (1 / scale).tolist()
    np.testing.assert_array_equal(bits(found.rows.data), in_numpy.quantize(x.numpy(), scale, dtype))
    assert q.by_amaxes(x, amaxes * float("nan"), dtype, 2, rows=True, columns=True).rows.inverse.tolist() == [1.0]


@pytest.mark.parametrize("block", [q.VECTOR, q.SQUARE, q.MICRO])
def test_blocks_of_zeros_and_of_numbers_that_are_not_finite(block):
    x = random(256, 256)
    x[:128, :128] = 0.0
    x[3, 200], x[200, 3] = float("inf"), float("nan")
    both = q.per_block(x, block, E4M3, rows=True, columns=True)
    assert_quantized(both.rows, x, block, E4M3)
    assert_quantized(both.columns, x.t(), block, E4M3)
    assert (q.dequantize(both.rows).isfinite() == x.isfinite()).all()
    assert (both.rows.inverse.float()[: 128 // block[0], : 128 // block[1]] == 1.0).all()


def test_only_what_is_asked_for():
    for rows, columns in ((True, False), (False, True)):
        for both in (
            q.per_tensor(random(4, 6), ONE, E4M3, rows=rows, columns=columns),
            q.per_block(random(4, 6), q.VECTOR, E4M3, rows=rows, columns=columns),
        ):
            assert (both.rows is not None, both.columns is not None) == (rows, columns)


@pytest.mark.parametrize("block", [q.VECTOR, q.SQUARE, q.MICRO])
def test_a_shard_is_quantized_as_in_the_whole(block):
    """Cut along both dims at multiples of 128."""
    x = difficult(384, 512)
    whole = q.per_block(x, block, E4M3, rows=True, columns=True)
    for rows, columns in (
        (slice(128, 384), slice(None)),
        (slice(None), slice(256, 512)),
        (slice(0, 128), slice(0, 128)),
    ):
        part = q.per_block(x[rows, columns], block, E4M3, rows=True, columns=True)
        for found, of_whole, (i, j) in zip(part, whole, ((rows, columns), (columns, rows)), strict=True):
            assert found.data.float().equal(of_whole.data.float()[i, j])
            assert q.dequantize(found).equal(q.dequantize(of_whole)[i, j])


@pytest.mark.parametrize("block", [q.VECTOR, q.SQUARE])
def test_scales_are_powers_of_two_and_lose_nothing(block):
    """Values that the format has are given back exactly, again and in bf16."""
    x = random(130, 257, dtype=torch.bfloat16)
    once = q.per_block(x, block, E4M3, rows=True, columns=False).rows
    values = q.dequantize(once)
    assert values.equal(values.bfloat16().float())
    again = q.per_block(values, block, E4M3, rows=True, columns=False).rows
    assert q.dequantize(again).equal(values)


def test_dequantize_is_near():
    """Within half a step: 2^-4 of a normal number, and half the smallest number of the format elsewhere."""
    x = random(130, 257)
    for block in (q.VECTOR, q.SQUARE):
        found = q.per_block(x, block, E4M3, rows=True, columns=False).rows
        inverse = torch.from_numpy(in_numpy.expand(found.inverse.numpy(), block, x.shape))
        assert ((q.dequantize(found) - x).abs() <= torch.maximum(x.abs() * 2.0**-4, 2.0**-10 * inverse)).all()
