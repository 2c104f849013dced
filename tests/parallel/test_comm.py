"""Every collective and region function: values, gradients, what is recorded, and what is said when a rank is lost."""

import multiprocessing
import os
import re
import time

import psutil
import pytest
import torch

from megatron.base.errors import CommError
from megatron.base.heartbeat import Call
from megatron.base.mesh import Mesh
from megatron.core.comm import collectives, regions
from megatron.core.comm.all_to_all import all_to_all_v
from megatron.core.groups import connect, create_groups
from tests import pool

SIZES = [2, 4]


def tensor(rank, *shape):
    """Small whole numbers, another tensor on each rank: sums are exact."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * (rank + 1) + rank


def values(rank, size):
    """What each collective gives on this rank, [name -> tensor]."""
    g = pool.groups(tp=size).tp
    mine = tensor(rank, 2 * size, 3)
    reductions = {op: collectives.all_reduce(mine.clone(), g, op) for op in ("sum", "max", "min")}
    late = mine.clone()
    collectives.all_reduce_async(late, g, "max").wait()
    gathered, handle = collectives.all_gather_async(mine, g)
    handle.wait()
    piece, handle = collectives.reduce_scatter_async(mine, g)
    handle.wait()
    assert mine.equal(tensor(rank, 2 * size, 3)), "inputs are left alone"
    collectives.barrier(g)
    return {
        **reductions,
        "all_reduce_async": late,
        "all_gather": collectives.all_gather(mine, g),
        "all_gather_async": gathered,
        "all_gather_strided": collectives.all_gather(mine.t(), g),
        "reduce_scatter": collectives.reduce_scatter(mine, g),
        "reduce_scatter_async": piece,
        "reduce_scatter_strided": collectives.reduce_scatter(tensor(rank, 3, 2 * size).t(), g),
        "broadcast": collectives.broadcast(mine.clone(), g),
        "broadcast_last": collectives.broadcast(mine.clone(), g, source=size - 1),
        "objects": collectives.gather_objects({"rank": rank}, g),
    }


@pytest.mark.parametrize("size", SIZES)
def test_values(size):
    inputs = torch.stack([tensor(rank, 2 * size, 3) for rank in range(size)])
    strided = torch.stack([tensor(rank, 3, 2 * size).t() for rank in range(size)]).sum(0)
    for rank, found in enumerate(pool.run(size, values)):
        piece = slice(2 * rank, 2 * rank + 2)
        expected = {
            "sum": inputs.sum(0),
            "max": inputs.amax(0),
            "min": inputs.amin(0),
            "all_reduce_async": inputs.amax(0),
            "all_gather": inputs.flatten(0, 1),
            "all_gather_async": inputs.flatten(0, 1),
            "all_gather_strided": inputs.transpose(1, 2).flatten(0, 1),
            "reduce_scatter": inputs.sum(0)[piece],
            "reduce_scatter_async": inputs.sum(0)[piece],
            "reduce_scatter_strided": strided[piece],
            "broadcast": inputs[0],
            "broadcast_last": inputs[-1],
        }
        assert found.pop("objects") == [{"rank": r} for r in range(size)]
        assert found.keys() == expected.keys()
        for name, result in expected.items():
            assert found[name].equal(result), f"{name} on rank {rank}"


def subgroup_values(rank, size):
    """Collectives on the axes of a 2 x 2 mesh: (sum over tp, sum over dp, gathered over dp, broadcast inside dp)."""
    g = pool.groups(tp=2)
    mine = torch.tensor([float(10**rank)])
    return (
        float(collectives.all_reduce(mine.clone(), g.tp)),
        float(collectives.all_reduce(mine.clone(), g.dp)),
        collectives.all_gather(mine, g.dp).tolist(),
        float(collectives.broadcast(mine.clone(), g.dp, source=1)),
    )


def test_groups_of_a_mesh():
    assert pool.run(4, subgroup_values) == [
        (11.0, 101.0, [1.0, 100.0], 100.0),
        (11.0, 1010.0, [10.0, 1000.0], 1000.0),
        (1100.0, 101.0, [1.0, 100.0], 100.0),
        (1100.0, 1010.0, [10.0, 1000.0], 1000.0),
    ]


def several_in_flight(rank, size):
    """Waited for in another order than they were started."""
    g = pool.groups(tp=size).tp
    tensors = [torch.full((1000 * (n + 1),), float(rank + n)) for n in range(5)]
    handles = [collectives.all_reduce_async(t, g) for t in tensors]
    for handle in reversed(handles):
        handle.wait()
    return [float(t.unique()) for t in tensors]


@pytest.mark.parametrize("size", SIZES)
def test_several_in_flight(size):
    ranks = size * (size - 1) / 2
    assert pool.run(size, several_in_flight) == [[ranks + n * size for n in range(5)]] * size


def dtypes(rank, size):
    g = pool.groups(tp=size).tp
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)
    return [collectives.all_reduce(torch.tensor([rank + 1], dtype=k), g).tolist() for k in kinds]


def test_dtypes():
    assert pool.run(2, dtypes) == [[[3]] * 5] * 2


class TestAGroupOfOne:
    def test_communicates_nothing(self):
        g = pool.groups().tp
        x = tensor(1, 4, 2)
        with g.heartbeat.record() as calls:
            assert collectives.all_reduce(x, g) is x
            assert collectives.all_gather(x, g) is x and collectives.reduce_scatter(x, g) is x
            assert collectives.broadcast(x, g) is x
            for start in (collectives.all_gather_async, collectives.reduce_scatter_async):
                result, handle = start(x, g)
                handle.wait()
                assert result is x
            collectives.barrier(g)
            assert collectives.gather_objects("a", g) == ["a"]
        assert calls == [] and g.process_group is None

    def test_regions_are_the_identity(self):
        for region in (regions.sum_partial, regions.sum_partial_to_sequence_shard):
            x = tensor(1, 4, 2).requires_grad_()
            y = region(x, pool.groups().tp)
            assert y.equal(x) and y is not x
            (gradient,) = torch.autograd.grad(y, x, tensor(3, 4, 2))
            assert gradient.equal(tensor(3, 4, 2))


def recorded(rank, size):
    g = pool.groups(tp=size).tp
    x = torch.zeros(4, 3, dtype=torch.bfloat16)
    before = g.heartbeat.state().sequences.get("tp", 0)
    with g.heartbeat.record() as calls:
        collectives.all_reduce(x, g)
        collectives.all_gather(x, g)
        with g.heartbeat.record() as inner:
            collectives.reduce_scatter(x.double(), g)
        collectives.broadcast(torch.zeros(5, dtype=torch.int64), g)
        collectives.barrier(g)
        collectives.gather_objects(1, g)
    collectives.all_reduce(x, g)
    state = g.heartbeat.state()
    return calls, inner, state.sequences["tp"] - before, state.collective


def test_recorder():
    scatter = Call("reduce_scatter", "tp", (4, 3), "float64", 96)
    expected = [
        Call("all_reduce", "tp", (4, 3), "bfloat16", 24),
        Call("all_gather", "tp", (4, 3), "bfloat16", 24),
        scatter,
        Call("broadcast", "tp", (5,), "int64", 40),
        Call("barrier", "tp", (), "object", 0),
        Call("gather_objects", "tp", (), "object", 0),
    ]
    assert pool.run(2, recorded) == [(expected, [scatter], 7, "")] * 2


def region_results(rank, size, name):
    """(output, gradient of the input) of a region function for an upstream gradient that differs by rank."""
    g = pool.groups(tp=size).tp
    x = tensor(rank, 2 * size, 3).requires_grad_()
    y = getattr(regions, name)(x, g)
    (gradient,) = torch.autograd.grad(y, x, tensor(rank, *y.shape) + 5)
    return y.detach(), gradient, x.detach().equal(tensor(rank, 2 * size, 3))


@pytest.mark.parametrize("size", SIZES)
class TestRegions:
    def test_sum_partial(self, size):
        """Forward: all-reduce; the gradient passes as it is."""
        total = sum(tensor(rank, 2 * size, 3) for rank in range(size))
        for rank, (y, gradient, untouched) in enumerate(pool.run(size, region_results, "sum_partial")):
            assert y.equal(total) and gradient.equal(tensor(rank, 2 * size, 3) + 5) and untouched

    def test_sum_partial_to_sequence_shard(self, size):
        """Forward: reduce-scatter; backward: all-gather."""
        total = sum(tensor(rank, 2 * size, 3) for rank in range(size))
        upstream = torch.cat([tensor(rank, 2, 3) + 5 for rank in range(size)])
        found = pool.run(size, region_results, "sum_partial_to_sequence_shard")
        for rank, (y, gradient, untouched) in enumerate(found):
            assert y.equal(total[2 * rank : 2 * rank + 2]) and gradient.equal(upstream) and untouched


def devices_of_groups(rank, size):
    """Sockets on which this process listens for other ranks: after making many groups, and with more of them."""

    def listening():
        return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections())

    few = pool.groups()
    before = listening()
    more = [pool.groups(tp=2), pool.groups(pp=2), pool.groups(cp=2), pool.groups(tp=2, instances=2)]
    for groups in [few, *more]:  # each works, all at once
        for group in (groups.world, groups.tp, groups.pp, groups.cp, groups.view(None).shard):
            assert collectives.all_reduce(torch.ones(1), group).item() == group.size
    return before, listening()


def test_groups_share_one_gloo_device():
    """Each device has a thread that wakes a hundred times a second: with one per group they took a whole core."""
    for before, after in pool.run(4, devices_of_groups):
        assert after <= before + 1  # none, or that of the first group of this process


# A lost rank: processes of their own, so that no other test meets the broken world.
INTERVAL, TIMEOUT = 0.1, 2.0


def join(rank, size, port):
    """Groups of a world that waits TIMEOUT seconds and beats every INTERVAL."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    heartbeat = connect(rank, size, backend="gloo", timeout_seconds=TIMEOUT)
    heartbeat.interval = INTERVAL
    heartbeat.start()
    groups = create_groups(Mesh.create(size), rank, heartbeat, TIMEOUT)
    collectives.barrier(groups.world)
    return groups


LOSABLE = {
    "all_reduce": lambda group: collectives.all_reduce(torch.ones(3), group),
    "all_to_all_v": lambda group: all_to_all_v(torch.ones(3), [1] * 3, [1] * 3, group),
}


def lose_a_rank(how, op, rank, size, port, pipe):
    """Ranks 0 .. size - 2 wait for the last one, which has gone, or does something else."""
    groups = join(rank, size, port)
    group = groups.world
    if rank == size - 1:
        if how == "dies":
            os._exit(3)
        if how == "fails":
            groups.heartbeat.fail("RuntimeError: no luck")
            time.sleep(60)
        with groups.heartbeat.phase("long-computation"):
            time.sleep(60)
    started = time.monotonic()
    try:
        LOSABLE[op](group)
        pipe.send(("no error", 0.0))
    except CommError as error:
        pipe.send((str(error), time.monotonic() - started))
    time.sleep(60)  # the store lives with rank 0: it must not end before the others have asked


def worlds_words(how, op, size):
    """What each waiting rank says: [(message, seconds)]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool.PRELOAD)
    port, pipes, processes = pool.free_port(), [], []
    for rank in range(size):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=lose_a_rank, args=(how, op, rank, size, port, there), daemon=True))
        processes[-1].start()
    try:
        waiting = pipes[:-1]
        assert all(pipe.poll(60) for pipe in waiting), "a rank never noticed"
        return [pipe.recv() for pipe in waiting]
    finally:
        for process in processes:
            process.kill()
            process.join()


WORDS = {
    "dies": "rank 2 is gone or frozen (no heartbeat any more",
    "hangs": "rank 2 has not arrived (phase 'long-computation', computing for",
    "fails": "rank 2 ended: RuntimeError: no luck",
}


@pytest.mark.alone
@pytest.mark.parametrize(("how", "op"), [*((how, "all_reduce") for how in WORDS), ("dies", "all_to_all_v")])
def test_a_lost_rank_is_named(how, op):
    """The message names the collective, its group and ranks, and what became of the missing one."""
    for message, seconds in worlds_words(how, op, 3):
        head, _, explanation = message.partition(" failed after ")
        assert head == f"{op} number 2 on group world (ranks 0, 1, 2)"
        assert WORDS[how] in explanation and not re.search(r"rank [01]\b", explanation), message
        assert seconds < TIMEOUT + 10, "seconds, not minutes"
