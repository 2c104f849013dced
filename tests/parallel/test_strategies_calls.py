"""Which collectives one optimizer step issues under each strategy: operation, group, elements, in order."""

import pytest

from tests import pool
from tests.parallel.strategies import STRATEGIES, make_run
from tests.unit.models.builds import LLAMA, take_step

SMALL = {**LLAMA, "num_layers": 1}
MICROBATCHES = 2
LOSS = ("all_reduce", "dp_cp", 4)  # weighted, of all labels, their number, and that of parameters without a gradient
NORM = ("all_reduce", "world", 1)


def step_calls(rank, size, settings, fields):
    """(calls of the second step, bytes a rank sends by operation, sizes of the buckets)"""
    run = make_run(settings, fields=fields)
    run.steps(1, MICROBATCHES)
    run.data_parallel.synchronize()
    batches = run.batches(1, MICROBATCHES)
    with run.groups.heartbeat.record() as calls:
        take_step(run.step, batches, 1e-3, 0.1)
        run.data_parallel.synchronize()
    found = []
    for call in calls:
        (elements,) = call.shape or (1,)
        found.append((call.op, call.group, elements))
    nbytes = {}
    for call in calls:
        nbytes[call.op, call.group] = nbytes.get((call.op, call.group), 0) + call.nbytes
    return found, nbytes, [bucket.size for bucket in run.data_parallel.buckets]


def recorded(world, settings, fields=SMALL):
    found = pool.run(world, step_calls, settings, fields)
    assert found == [found[0]] * world, "all ranks issue the same"
    return found[0]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "params"])
@pytest.mark.parametrize("world", [3, 4])
def test_one_step(world, name):
    calls, _, sizes = recorded(world, STRATEGIES[name])
    assert len(sizes) > 3 and all(n % (64 * (1 if name.startswith("plain") else world)) == 0 for n in sizes)
    if name.startswith("plain"):
        # In the order of backward. Every rank has the whole norm, but all decide by one whether the step is applied.
        assert calls == [*[("all_reduce", "replicas", n) for n in sizes], LOSS, NORM]
        return
    passes = MICROBATCHES if name.startswith("grads") else 1
    assert calls == [
        *[("reduce_scatter", "shard", n) for n in sizes] * passes,
        LOSS,
        NORM,
        *[("all_gather", "gather", n // world) for n in reversed(sizes)],  # the order of forward
    ]


def test_two_instances():
    """The slices' all-reduce between instances is part of a bucket's reduction."""
    calls, _, sizes = recorded(4, {**STRATEGIES["optim, overlapped"], "instances": 2})
    assert calls == [
        *[("reduce_scatter", "shard", n) for n in sizes],
        LOSS,
        NORM,
        *[("all_gather", "gather", n // 2) for n in reversed(sizes)],
    ]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["optim", "optim, overlapped", "grads, overlapped"])
def test_bytes(name, half):
    """Reduce-scatter and all-gather of the padded buckets in their dtypes, and nothing else worth counting."""
    world, fields = 3, {**SMALL, "bf16": half}
    settings = {**STRATEGIES[name], "reduce_in_bf16": half}
    _, nbytes, sizes = recorded(world, settings, fields)
    padded, itemsize = sum(sizes), 2 if half else 4
    passes = MICROBATCHES if name.startswith("grads") else 1
    assert nbytes.pop(("reduce_scatter", "shard")) == passes * itemsize * padded
    assert nbytes.pop(("all_gather", "gather")) * world == itemsize * padded
    assert sum(nbytes.values()) == 40, "loss, norm"


def test_sharded_parameters():
    """Gathered for each forward and once more for each backward, at most; reduced as sharded gradients are."""
    world = 3
    calls, _, sizes = recorded(world, STRATEGIES["params"])
    reductions = [call for call in calls if call[0] == "reduce_scatter"]
    assert reductions == [("reduce_scatter", "shard", n) for n in sizes] * MICROBATCHES
    gathers = [call for call in calls if call[0] == "all_gather"]
    assert sorted(set(gathers)) == sorted({("all_gather", "gather", n // world) for n in sizes})
    assert MICROBATCHES * len(sizes) <= len(gathers) <= 2 * MICROBATCHES * len(sizes) + len(sizes)
    assert [call for call in calls if call[0] == "all_reduce"] == [LOSS, NORM]
