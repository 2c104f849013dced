"""Gradients summed over dp and tp: right for any dp and strategy, and the norm counts every element once."""

import functools

import pytest
import torch
from torch import nn

from megatron.config.data_parallel import DataParallelSettings
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.parameter import local_parameters, make_parameter
from megatron.spec.parameter import Init, ParamSpec
from tests import pool
from tests.parallel.strategies import FEW, STRATEGIES, groups_for
from tests.unit.distributed.test_bucket import Holder, used
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    accumulate,
    assemble,
    assert_gradients,
    differentiate,
    gradients,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
    pieces,
)

SAMPLES = 12


def reduced(rank, size, fields, tp, sequence_parallel, settings):
    """Pieces of the gradient of SAMPLES samples, cut over dp in equal shares."""
    groups = groups_for(settings, tp)
    model = make_model(fields, groups, sequence_parallel=sequence_parallel, spread=0.1)
    data_parallel = make_data_parallel(model, groups, **settings)
    mine = make_ids(SAMPLES, 16).chunk(groups.dp.size)[groups.dp.rank]
    accumulate(model, data_parallel, mine.split(2))
    return pieces(data_parallel)


MODELS = {"llama": LLAMA, "gpt": GPT}


@functools.cache
def expected_sum(model):
    return assemble(pool.run(1, reduced, MODELS[model], 1, False, {}))


def assert_sum(model, world, tp, sequence_parallel, settings):
    found = assemble(pool.run(world, reduced, MODELS[model], tp, sequence_parallel, settings))
    assert_gradients(found, expected_sum(model))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel"),
    [(2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (2, 2, True), (4, 2, True), (4, 4, True)],
)
def test_sum_is_that_of_one_process(model, world, tp, sequence_parallel):
    assert_sum(model, world, tp, sequence_parallel, {})


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "plain"])
@pytest.mark.parametrize(("model", "world", "tp", "sequence_parallel"), [("llama", 3, 1, False), ("gpt", 4, 2, True)])
def test_sum_under_every_strategy(model, world, tp, sequence_parallel, strategy):
    assert_sum(model, world, tp, sequence_parallel, STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", ["optim, overlapped", "grads"])
def test_sum_over_two_instances(strategy):
    assert_sum("gpt", 4, 1, False, {**STRATEGIES[strategy], "instances": 2})


def four_parameters(rank, size, settings):
    """Buckets of one to three parameters, whole numbers: (gradients, largest padding, sizes of the buckets)."""
    groups = groups_for(settings)
    init = Init("constant", 0.0)
    shapes = {"a": (3,), "b": (130,), "c": (5, 7), "unused": (9,)}
    parameters = {
        name: make_parameter(ParamSpec(shape, init), groups, dtype=torch.float32, device=CPU)
        for name, shape in shapes.items()
    }
    for parameter in parameters.values():
        nn.init.ones_(parameter)
    holder = Holder(parameters)
    data_parallel = DataParallel(holder, groups, DataParallelSettings(bucket_size=150, **settings), CPU)
    for _ in range(2):  # the second step starts anew
        data_parallel.begin_step(1)
        total = sum((getattr(holder, name) * float((rank + 1) * 10**n)).sum() for n, name in enumerate("abc"))
        if rank == 1:
            total = total + (holder.unused * 4.0).sum()  # on this rank alone
        differentiate(data_parallel, total, last=True)
        data_parallel.finish_reduction()
    padding = [b.grad_shard[~b.view.own(used(b))].abs().sum() for b in data_parallel.buckets]
    return pieces(data_parallel), float(sum(padding)), [bucket.size for bucket in data_parallel.buckets]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_by_hand(size, strategy):
    """A slice may hold the ends of two parameters, a part of one, or nothing but padding."""
    ranks = pool.run(size, four_parameters, STRATEGIES[strategy])
    found = {name: gradient.unique().tolist() for name, gradient in assemble([r[0] for r in ranks]).items()}
    total = float(size * (size + 1) // 2)
    assert found == {"a": [total], "b": [10 * total], "c": [100 * total], "unused": [4.0]}
    shards = 1 if strategy.startswith("plain") else size
    for _, padding, sizes in ranks:
        assert padding == 0.0 and len(sizes) == 2 and all(n % (64 * shards) == 0 for n in sizes)


def norms(rank, size, tp, sequence_parallel, settings):
    """(gradient norm, zeros, norm of the parameters) of one step, and the norm after it."""
    groups = groups_for(settings, tp)
    model = make_model(GPT, groups, sequence_parallel=sequence_parallel, spread=0.1)
    data_parallel = make_data_parallel(model, groups, **settings)
    optimizer = make_optimizer(data_parallel, groups, clip_grad=0.1)
    accumulate(model, data_parallel, [make_ids(SAMPLES, 16).chunk(groups.dp.size)[groups.dp.rank]])
    before = float(optimizer.params_norm())
    update = optimizer.step(1e-2, 0.1, count_zeros=True)
    return float(update.grad_norm), int(update.num_zeros), before, float(optimizer.params_norm())


def assert_norms(world, tp, sequence_parallel, settings):
    """The same numbers on every rank, and those of one process."""
    ((norm, zeros, before, after),) = pool.run(1, norms, 1, False, {})
    found = pool.run(world, norms, tp, sequence_parallel, settings)
    assert found == [found[0]] * world
    assert found[0][0] == pytest.approx(norm, rel=1e-5) and found[0][1] == zeros > 0
    assert found[0][2] == pytest.approx(before, rel=1e-6) and found[0][3] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel"), [(2, 2, False), (2, 2, True), (4, 4, True), (4, 2, True), (2, 1, False)]
)
def test_norms_count_every_element_once(world, tp, sequence_parallel):
    """Replicated parameters by one tp rank, replicas not at all."""
    assert_norms(world, tp, sequence_parallel, {})


@pytest.mark.parametrize("strategy", [name for name in FEW if name != "plain"])
@pytest.mark.parametrize(("world", "tp", "sequence_parallel"), [(3, 1, False), (4, 2, True)])
def test_norms_of_slices(world, tp, sequence_parallel, strategy):
    """Slices by their owner, tied and replicated parameters once."""
    assert_norms(world, tp, sequence_parallel, STRATEGIES[strategy])


def memory(rank, size, settings):
    """Elements that stay allocated between steps: gradients, parameters; then of borrowed blocks, and each bucket's."""
    groups = groups_for(settings)
    model = make_model(LLAMA, groups)
    data_parallel = make_data_parallel(model, groups, bucket_size=1000, **settings)
    for _ in range(2):
        accumulate(model, data_parallel, make_ids(6, 16).split(2))
    data_parallel.synchronize()
    buckets = data_parallel.buckets
    gradients = {b.grad_shard.untyped_storage().data_ptr(): b.grad_shard.untyped_storage().nbytes() for b in buckets}
    weights = {b.param_shard.untyped_storage().data_ptr(): b.param_shard.untyped_storage().nbytes() for b in buckets}
    views = sum(p.numel() for p in model.parameters())
    sizes = [bucket.size for bucket in buckets]
    blocks = (data_parallel.gradient_bytes() - sum(gradients.values())) // 4
    return sum(gradients.values()) // 4, sum(weights.values()) // 4, views, blocks, sizes


@pytest.mark.parametrize("strategy", FEW)
def test_memory(strategy):
    """What is sharded is a shard; gradients that are not kept pass through a few blocks, however many buckets."""
    for held, weights, views, blocks, sizes in pool.run(3, memory, STRATEGIES[strategy]):
        share = 1 if strategy in ("plain", "optim", "optim, overlapped") else 3
        assert held == sum(sizes) // share and len(sizes) > 8
        assert weights == sum(sizes) // (3 if strategy == "params" else 1)
        assert (views == 0) == (strategy == "params"), "nobody can read what is not there"
        assert blocks == 0 if share == 1 else min(sizes) <= blocks <= 2 * sum(sorted(sizes)[-4:])


def overflow(rank, size):
    """A gradient that is not finite on one tp rank stops all."""
    groups = pool.groups(tp=size)
    model = make_model(LLAMA, groups)
    data_parallel = make_data_parallel(model, groups)
    optimizer = make_optimizer(data_parallel, groups)
    accumulate(model, data_parallel, [make_ids(2, 16)])
    if rank == 1:
        local_parameters(model)["output_layer.weight"].slot.main_grad[0, 0] = float("inf")
    before = [bucket.whole.clone() for bucket in data_parallel.buckets]
    update = optimizer.step(1e-2, 0.0)
    return (
        bool(update.applied),
        all(bucket.whole.equal(old) for bucket, old in zip(data_parallel.buckets, before, strict=True)),
        gradients(data_parallel)["output_layer.weight"].isinf().any().item(),
    )


def test_an_overflow_anywhere_stops_all():
    assert pool.run(2, overflow) == [(False, True, False), (False, True, True)]


def overflow_in_a_slice(rank, size, settings):
    """One element of one rank's own slice is not finite: (applied, whether any slice or state has changed)."""
    groups = groups_for(settings)
    model = make_model(LLAMA, groups)
    data_parallel = make_data_parallel(model, groups, **settings)
    optimizer = make_optimizer(data_parallel, groups)
    accumulate(model, data_parallel, [make_ids(6, 16).chunk(size)[rank]])
    if rank == 1:
        data_parallel.buckets[0].grad_shard[0] = float("inf")
    before = [part.clone() for _, part in data_parallel.weights()]
    update = optimizer.step(1e-2, 0.1)
    data_parallel.synchronize()
    kept = all(part.equal(old) for (_, part), old in zip(data_parallel.weights(), before, strict=True))
    return bool(update.applied), kept, all(tensor.eq(0).all() for _, _, tensor in optimizer.pieces())


@pytest.mark.parametrize("strategy", [name for name in FEW if name != "plain"])
def test_an_overflow_in_one_slice_stops_all(strategy):
    assert pool.run(3, overflow_in_a_slice, STRATEGIES[strategy]) == [(False, True, True)] * 3
