"""Rows that are added to an embedding's gradient: the same as by way of a tensor as large as the embedding."""

import pytest
import torch

from megatron.kernels.ops.embedding_grad import add_rows, add_sorted

V, H = 37, 5
IDS = {
    "random": torch.randint(0, V, (300,), generator=torch.Generator().manual_seed(1)),
    "all equal": torch.full((300,), 3),
    "bags of 64 and 65": torch.tensor([7] * 64 + [2] * 65 + [9] * 128 + [0]),
    "each once, backwards": torch.arange(V).flip(0),
    "one": torch.tensor([V - 1]),
    "none": torch.empty(0, dtype=torch.int64),
    "more rows than the table has": torch.arange(V).repeat(20),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(ids, grad):
    return torch.ops.aten.embedding_dense_backward(grad, ids, V, -1, False)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("add", [add_rows, add_sorted])
def test_equals_the_dense_way(name, add):
    """In fp32, on top of what is there."""
    ids = IDS[name]
    grad, before = normal(len(ids), H), normal(V, H, seed=1)
    main_grad = before.clone()
    add(main_grad, ids, grad)
    expected = before.double() + dense(ids, grad.double())
    scale = expected.abs().max()
    torch.testing.assert_close(main_grad.double() / scale, expected / scale, rtol=0, atol=1e-6)
    untouched = torch.ones(V, dtype=torch.bool).index_fill_(0, ids, False)
    assert main_grad[untouched].equal(before[untouched])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_fp32(dtype):
    """No error but that of fp32, where the dense way rounds every sum to the dtype."""
    ids, grad = IDS["random"], normal(300, H).to(dtype)
    exact = dense(ids, grad.double())
    main_grad, rounded = torch.zeros(V, H), dense(ids, grad).double()
    add_sorted(main_grad, ids, grad)
    error = (main_grad - exact).abs().max()
    assert error <= 1e-6 * exact.abs().max() and error < (rounded - exact).abs().max()


def test_equal_bits_whatever_the_order_of_other_ids():
    """The sum of an id depends on its own rows in their order, and not on the ids between them."""
    mine, others = normal(200, H), normal(200, H, seed=1)
    found = []
    for place in (0, 1):
        ids = torch.stack([torch.full((200,), 5), torch.full((200,), 6)][:: 1 - 2 * place], dim=1).flatten()
        grad = torch.stack([mine, others][:: 1 - 2 * place], dim=1).flatten(0, 1)
        main_grad = torch.zeros(V, H)
        add_sorted(main_grad, ids, grad)
        found.append(main_grad[5])
    assert found[0].equal(found[1])
