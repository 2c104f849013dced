"""Slopes of ALiBi, and their products with positions as channels of queries and keys."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from megatron.config.positions import ALIBI_POSITIONS
from megatron.kernels.ops.alibi import position_channels, slope_channels, with_channels
from megatron.spec.attention import AlibiSpec

CPU = torch.device("cpu")
HEADS = (1, 2, 5, 6, 8, 12, 40, 112)


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_those_of_transformers(heads):
    """BLOOM's positions count from the first key, MPT's from the last one."""
    slopes = torch.tensor(AlibiSpec(heads, 8.0, 1.0).slopes)
    bloom = build_alibi_tensor(torch.ones(1, 9, dtype=torch.int64), heads, torch.float32)
    torch.testing.assert_close(slopes, bloom[:, 0, 1])
    for largest in (8, 5):
        slopes = torch.tensor(AlibiSpec(heads, float(largest), 1.0).slopes)
        torch.testing.assert_close(-slopes, build_mpt_alibi_tensor(heads, 9, largest)[:, 0, -2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_channels_are_slope_times_position(dtype):
    """To the 24 bits of three numbers, with the factor that scaled scores of heads of 128 channels need."""
    slopes = AlibiSpec(12, 8.0, 128**0.5).slopes
    positions = torch.tensor([[0, 1, 255, 256, 257, 2047, ALIBI_POSITIONS - 1]])
    queries = with_channels(torch.zeros(7, 1, 12, 4, dtype=dtype), [slope_channels(slopes, dtype, CPU)])
    keys = with_channels(torch.zeros(7, 1, 12, 4, dtype=dtype), position_channels(positions, dtype))
    assert queries.dtype == keys.dtype == dtype and queries.shape == keys.shape == (7, 1, 12, 12)
    products = (queries.double() * keys.double()).sum(-1)[:, 0]
    expected = positions[0, :, None] * torch.tensor(slopes, dtype=torch.float64)
    limit = 2.0**-24 if dtype != torch.float16 else 2.0**-20  # fp16 has no small numbers
    assert ((products - expected).abs() <= limit * expected).all()


def test_positions_of_samples_differ():
    high, low = position_channels(torch.tensor([[3, 300], [7, 0]]), torch.bfloat16)
    assert high[..., 0, 0].tolist() == [[0, 0], [1, 0]] and low[..., 0, 0].tolist() == [[3, 7], [44, 0]]
