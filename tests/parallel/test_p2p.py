"""Shifts round a ring and all-to-alls: values, what is left alone, what is recorded."""

import pytest
import torch

from megatron.base.heartbeat import Call
from megatron.core.comm.all_to_all import all_to_all_async
from megatron.core.comm.p2p import shift_async
from tests import pool

SIZES = [2, 3, 4]


def tensor(rank, *shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).view(shape).add(100 * rank).to(dtype)


def shifted(rank, size):
    """Two shifts in flight, waited for in the other order; then one more with what came."""
    group = pool.groups(cp=size).cp
    first, second = tensor(rank, 3, 2), tensor(rank, 2, 3, dtype=torch.bfloat16).t()
    got_first, handle_first = shift_async(first, group, 1)
    got_second, handle_second = shift_async(second, group, 2)
    handle_second.wait()
    handle_first.wait()
    assert handle_first.is_completed() and first.equal(tensor(rank, 3, 2)), "what is sent is left alone"
    again, handle = shift_async(got_first, group, 1)
    handle.wait()
    return got_first, got_second, again


@pytest.mark.parametrize("size", SIZES)
def test_shift(size):
    for rank, (first, second, again) in enumerate(pool.run(size, shifted)):
        assert first.equal(tensor((rank - 1) % size, 3, 2))
        assert second.equal(tensor((rank - 1) % size, 2, 3, dtype=torch.bfloat16).t())
        assert again.equal(tensor((rank - 2) % size, 3, 2))


def many(rank, size):
    """As many under one tag as a ring has steps: they arrive in order."""
    group = pool.groups(cp=size).cp
    sent = [shift_async(torch.full((1000,), float(100 * rank + n)), group) for n in range(8)]
    for _, handle in sent:
        handle.wait()
    return [float(got.unique()) for got, _ in sent]


@pytest.mark.parametrize("size", [2, 3])
def test_order(size):
    assert pool.run(size, many) == [[100.0 * ((rank - 1) % size) + n for n in range(8)] for rank in range(size)]


def all_to_all(x, group):
    received, handle = all_to_all_async(x, group)
    handle.wait()
    return received


def exchanged(rank, size):
    group = pool.groups(cp=size).cp
    mine = tensor(rank, size, 3)
    got = all_to_all(mine, group)
    strided = all_to_all(tensor(rank, 3, size, dtype=torch.bfloat16).t(), group)
    assert mine.equal(tensor(rank, size, 3)) and all_to_all(got, group).equal(mine)
    return got, strided


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(size):
    for rank, (got, strided) in enumerate(pool.run(size, exchanged)):
        assert got.equal(torch.stack([tensor(source, size, 3)[rank] for source in range(size)]))
        columns = [tensor(source, 3, size, dtype=torch.bfloat16)[:, rank] for source in range(size)]
        assert strided.equal(torch.stack(columns))


def calls(rank, size):
    group = pool.groups(cp=size).cp
    with group.heartbeat.record() as seen:
        shift_async(torch.ones(4, 3, dtype=torch.bfloat16), group)[1].wait()
        all_to_all(torch.ones(size, 5), group)
    return seen, group.heartbeat.state().collective


def test_recorded():
    expected = [Call("shift", "cp", (4, 3), "bfloat16", 24), Call("all_to_all", "cp", (2, 5), "float32", 40)]
    assert pool.run(2, calls) == [(expected, "")] * 2


def test_one_rank():
    group = pool.groups().cp
    x = torch.ones(1, 3)
    with group.heartbeat.record() as seen:
        assert shift_async(x, group)[0] is x and all_to_all(x, group) is x
    assert seen == []
