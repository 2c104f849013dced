"""The norm's and the embedding's kernels in Triton's interpreter; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.core.optimizer.grad_norm import global_norm
from megatron.kernels.backends.triton.embedding_grad import add_rows
from megatron.kernels.backends.triton.square_sum import ROWS, TILES, square_sum
from megatron.kernels.ops.embedding_grad import BAG
from megatron.spec.buckets import NORM_ROW
from tests import pool
from tests.unit.kernels.close import random
from tests.unit.kernels.test_embedding_grad import IDS, H, V, dense, normal
from tests.unit.models.builds import CPU

PROGRAM = NORM_ROW * ROWS * TILES


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, PROGRAM, PROGRAM + 1, 2 * PROGRAM + 100])
def test_square_sum(size):
    x = random(size)
    assert square_sum(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_seen(bad):
    x = random(PROGRAM + 7)
    x[-1] = bad
    assert not square_sum(x).isfinite()


@pytest.mark.parametrize("rows", [1, 3, ROWS, 1000])
def test_the_norm_is_the_same_bits_for_all_slices(rows):
    x = random(2 * PROGRAM + 64 * 5)

    def norm(*tensors):
        counted = [("dense", tensor) for tensor in tensors]
        return global_norm(counted, pool.groups(), CPU, square_sum)

    assert norm(*x.split(NORM_ROW * rows)) == norm(x)


LONG = {
    **IDS,
    "one bag": torch.full((BAG,), 3),
    "a bag and a row": torch.full((BAG + 1,), 3),
    "long ids behind each other": torch.tensor([1] * (2 * BAG + 1) + [2] * (BAG + 1) + [4] * (5 * BAG) + [5]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LONG)
def test_rows_are_added(name, dtype):
    """In fp32, on top of what is there; other rows stay."""
    ids = LONG[name]
    grad, before = normal(len(ids), H).to(dtype), normal(V, H, seed=1)
    main_grad = before.clone()
    add_rows(main_grad, ids, grad)
    expected = before.double() + dense(ids, grad.double())
    scale = expected.abs().max()
    torch.testing.assert_close(main_grad.double() / scale, expected / scale, rtol=0, atol=1e-6)
    untouched = torch.ones(V, dtype=torch.bool).index_fill_(0, ids, False)
    assert main_grad[untouched].equal(before[untouched])


def test_wide_rows_with_a_stride():
    """More columns than a program has, in a part of a wider matrix."""
    ids = torch.tensor([3, 1, 3] + [0] * (BAG + 3))
    grad = normal(len(ids), 3000)[:, 7:2057]
    main_grad = torch.zeros(5, 2050)
    add_rows(main_grad, ids, grad)
    torch.testing.assert_close(main_grad, torch.zeros(5, 2050).index_add_(0, ids, grad), rtol=1e-5, atol=1e-5)


def test_equal_bits_whatever_the_other_ids():
    """The sum of an id depends on its own rows in their order, and not on the ids before and between them."""
    mine, others = normal(200, H), normal(200, H, seed=1)
    results = []
    for other in (0, 6):
        ids = torch.stack([torch.full((200,), 5), torch.full((200,), other)], dim=1).flatten()
        main_grad = torch.zeros(V, H)
        add_rows(main_grad, ids, torch.stack([mine, others], dim=1).flatten(0, 1))
        results.append(main_grad[5])
    assert results[0].equal(results[1])
