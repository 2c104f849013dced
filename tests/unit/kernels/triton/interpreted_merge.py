"""The merge of blocks of attention in Triton's interpreter; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.kernels.backends.triton import merge
from megatron.kernels.ops import attention_lse as reference
from tests.unit.kernels.close import random
from tests.unit.kernels.triton.near import assert_near

INF = float("inf")


def merged(function, out, lse, *block):
    out, lse = out.clone(), lse.clone()
    function(out, lse, *block)
    return out, lse


@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (1, 1, 1, 1), (4, 1, 40, 80), (0, 1, 2, 8)])
def test_parity(shape):
    s, b, n, _ = shape
    out, block = random(*shape), random(*shape, seed=1)
    lse, block_lse = random(b, n, s, seed=2, scale=3.0), random(b, n, s, seed=3, scale=3.0)
    assert_near(*(merged(each, out, lse, block, block_lse) for each in (merge.merge_, reference.merge_)))


def test_queries_without_keys():
    """Of four queries, the first has no key so far, the second none in the block, the third in neither."""
    out, block = random(4, 1, 1, 8), random(4, 1, 1, 8, seed=1)
    lse, block_lse = torch.tensor([[[-INF, 1.0, -INF, 2.0]]]), torch.tensor([[[1.5, -INF, -INF, 0.5]]])
    found, expected = (merged(each, out, lse, block, block_lse) for each in (merge.merge_, reference.merge_))
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][0], block[0]) and torch.equal(found[0][1], out[1]) and found[0][2].isnan().all()


def test_views_are_written_in_place():
    whole, whole_lse = random(6, 2, 3, 8), random(2, 3, 6, seed=1)
    expected, expected_lse = whole.clone(), whole_lse.clone()
    block, block_lse = random(3, 2, 3, 16, seed=2)[..., ::2], random(3, 2, 3, seed=3).permute(1, 2, 0)
    reference.merge_(expected[2:5], expected_lse[..., 2:5], block, block_lse)
    merge.merge_(whole[2:5], whole_lse[..., 2:5], block, block_lse)
    assert_near((whole, whole_lse), (expected, expected_lse))
