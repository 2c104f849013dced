"""Gradients summed over dp and tp: right for any dp, and the norm counts every element once."""

import math

import pytest
import torch
from torch import nn

from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.parameter import Init, local_parameters, make_parameter
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    assemble,
    assert_gradients,
    gradients,
    losses,
    make_buffers,
    make_ids,
    make_model,
    make_optimizer,
    pieces,
)

SAMPLES = 12


def reduced(rank, size, fields, tp, sequence_parallel):
    """Pieces of the gradient of SAMPLES samples, cut over dp in equal shares."""
    groups = pool.groups(tp=tp)
    model = make_model(fields, groups, sequence_parallel=sequence_parallel, spread=0.1)
    buffers = make_buffers(model, groups)
    mine = make_ids(SAMPLES, 16).chunk(groups.dp.size)[groups.dp.rank]
    for ids in mine.split(2):
        losses(model, ids).sum().backward()
    for buffer in buffers:
        buffer.reduce()
    return pieces(buffers)


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel"),
    [(2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (2, 2, True), (4, 2, True), (4, 4, True)],
)
def test_sum_is_that_of_one_process(fields, world, tp, sequence_parallel):
    expected = assemble(pool.run(1, reduced, fields, 1, False))
    found = assemble(pool.run(world, reduced, fields, tp, sequence_parallel))
    assert_gradients(found, expected)


def three_parameters(rank, size):
    """Buckets of one to three parameters, whole numbers: (gradients, elements of the buffer outside parameters)."""
    groups = pool.groups()
    init = Init("constant", 0.0)
    shapes = {"a": (3,), "b": (130,), "c": (5, 7), "unused": (9,)}
    parameters = {
        name: make_parameter(shape, init, dtype=torch.float32, device=CPU, tp=groups.tp)
        for name, shape in shapes.items()
    }
    for parameter in parameters.values():
        nn.init.zeros_(parameter)
    buffer = GradBuffer(parameters, dp=groups.dp_cp, tp=groups.tp, bucket_size=100)
    for _ in range(2):  # the second step starts anew
        buffer.clear()
        for number, name in enumerate(("a", "b", "c")):
            (parameters[name] * float((rank + 1) * 10**number)).sum().backward()
        if rank == 1:
            (parameters["unused"] * 4.0).sum().backward()  # on this rank alone
        buffer.reduce()
    used = torch.zeros(buffer.grads.numel(), dtype=torch.bool)
    for name in parameters:
        buffer.slice_of(used, name).fill_(True)
    uniform = {name: p.slot.main_grad.unique().tolist() for name, p in parameters.items()}
    step = math.lcm(size, 128)
    sizes = [b.end - b.start for b in buffer.buckets]
    return uniform, float(buffer.grads[~used].abs().max()), [n % step for n in sizes], len(sizes)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_by_hand(size):
    total = float(size * (size + 1) // 2)
    expected = {"a": [total], "b": [10 * total], "c": [100 * total], "unused": [4.0]}
    for uniform, padding, rest, buckets in pool.run(size, three_parameters):
        assert uniform == expected and padding == 0.0 and set(rest) == {0} and buckets == 2


def norms(rank, size, tp, sequence_parallel):
    """(gradient norm, zeros, norm of the parameters) of one step, and the norm after it."""
    groups = pool.groups(tp=tp)
    model = make_model(GPT, groups, sequence_parallel=sequence_parallel, spread=0.1)
    buffers = make_buffers(model, groups)
    optimizer = make_optimizer(buffers, groups, clip_grad=0.1)
    mine = make_ids(4, 16).chunk(groups.dp.size)[groups.dp.rank]
    losses(model, mine).sum().backward()
    for buffer in buffers:
        buffer.reduce()
    before = optimizer.params_norm()
    update = optimizer.step(1e-2, 0.1, count_zeros=True)
    return update.grad_norm, update.num_zeros, before, optimizer.params_norm()


@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel"), [(2, 2, False), (2, 2, True), (4, 4, True), (4, 2, True), (2, 1, False)]
)
def test_norms_count_every_element_once(world, tp, sequence_parallel):
    """Replicated parameters by one tp rank, replicas not at all; the same numbers on every rank."""
    ((norm, zeros, before, after),) = pool.run(1, norms, 1, False)
    found = pool.run(world, norms, tp, sequence_parallel)
    assert found == [found[0]] * world
    assert found[0][0] == pytest.approx(norm, rel=1e-5) and found[0][1] == zeros > 0
    assert found[0][2] == pytest.approx(before, rel=1e-6) and found[0][3] == pytest.approx(after, rel=1e-5)


def overflow(rank, size):
    """A gradient that is not finite on one tp rank stops all."""
    groups = pool.groups(tp=size)
    model = make_model(LLAMA, groups)
    buffers = make_buffers(model, groups)
    optimizer = make_optimizer(buffers, groups)
    losses(model, make_ids(2, 16)).sum().backward()
    buffers[0].reduce()
    if rank == 1:
        local_parameters(model)["output_layer.weight"].slot.main_grad[0, 0] = float("inf")
    before = buffers[0].params.clone()
    update = optimizer.step(1e-2, 0.0)
    return (
        update.applied,
        buffers[0].params.equal(before),
        gradients(buffers)["output_layer.weight"].isinf().any().item(),
    )


def test_an_overflow_anywhere_stops_all():
    assert pool.run(2, overflow) == [(False, True, False), (False, True, True)]
