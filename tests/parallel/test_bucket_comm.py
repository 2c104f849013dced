"""Buckets reduced and gathered over shards and replicas: against plain sums, many in flight, and with a lost peer."""

import multiprocessing
import os
import random
import re
import time

import pytest
import torch

from megatron.base.errors import CommError
from megatron.base.mesh import Mesh
from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import barrier
from megatron.core.groups import connect, create_groups
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests import pool

CPU = torch.device("cpu")
# (processes, instances of the optimizer): shards x replicas. None: every process is an instance.
CUTS = [(2, None), (2, 1), (3, None), (3, 1), (4, None), (4, 1), (4, 2)]
cuts = pytest.mark.parametrize(("size", "instances"), CUTS)


def bucket_comm(groups, dtype=torch.float32):
    """The communication of dense buckets, and their view."""
    return BucketComm(dtype, Streams(CPU, Timeline(CPU))), groups.view(None)


def bucket(rank, n, number=0):
    """Random numbers that depend on the rank and the bucket's number."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * number + rank))


def in_rank_order(pieces):
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def shards_of(size, instances):
    return 1 if instances is None else size // instances


def expected_sum(size, instances, n, number, dtype=torch.float32):
    """In rank order over the shards of each instance, then over the instances, rounded to the wire where it is sent."""
    shards = shards_of(size, instances)
    found = [bucket(rank, n, number).to(dtype).float() for rank in range(size)]
    within = [in_rank_order(found[i : i + shards]) for i in range(0, size, shards)]
    if len(within) == 1:
        return within[0]
    return in_rank_order([total.to(dtype).float() for total in within]).to(dtype).float()


def reduce_and_gather(rank, size, instances, n, dtype):
    """(own slice of the sum, whether memory of the other slices was left as large, bucket gathered from own slices)."""
    groups = pool.groups(instances=instances)
    comm, view = bucket_comm(groups, dtype)
    full, done = bucket(rank, n), []
    comm.reduce(view, full, "0", lambda: done.append(view.own(full).clone())).wait()
    (at_then,) = done
    reduced = view.own(full).clone()
    assert at_then.equal(reduced), "the sum is there when `then` runs"
    comm.gather(view, full, "0").wait()
    return reduced, full, view.shard.rank


@cuts
@pytest.mark.parametrize("n", [12, 12 * 64, 12 * 5000])
def test_sum_and_copy(size, instances, n):
    """Bit for bit the sum in rank order, and every rank then holds all of it."""
    expected = expected_sum(size, instances, n, 0)
    for reduced, full, shard in pool.run(size, reduce_and_gather, instances, n, torch.float32):
        assert reduced.equal(expected.view(shards_of(size, instances), -1)[shard])
        assert full.equal(expected)


@cuts
def test_bf16_on_the_wire(size, instances):
    """Rounded once to be sent and added in fp32; between instances, where the sum is sent again, once more."""
    n = 12 * 64
    expected = expected_sum(size, instances, n, 0, torch.bfloat16)
    found = pool.run(size, reduce_and_gather, instances, n, torch.bfloat16)
    for _, full, _ in found:
        assert full.equal(expected) and full.dtype == torch.float32
    plain = expected_sum(size, instances, n, 0)
    assert not expected.equal(plain)
    # Each of up to 3 roundings is within 2^-8 of a number that is at most the largest partial sum.
    assert (expected - plain).abs().max() <= 3 * 2.0**-8 * size * max(bucket(r, n).abs().max() for r in range(size))


def many(rank, size, instances):
    """Buckets of several sizes, submitted at once between pauses that differ by rank; gathers in between."""
    comm, view = bucket_comm(pool.groups(instances=instances))
    sizes = [12 * (1 + 700 * (number % 4)) for number in range(16)]
    gradients = [bucket(rank, n, number) for number, n in enumerate(sizes)]
    weights = [torch.full((n,), -1.0) for n in sizes]
    order, handles, gathers = [], [], []
    pauses = random.Random(rank)
    for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        view.own(weight).fill_(float(number))
        time.sleep(pauses.choice([0.0, 0.0, 0.002, 0.01]))
        handles.append(comm.reduce(view, gradient, str(number), lambda number=number: order.append(number)))
        gathers.append(comm.gather(view, weight, str(number)))
    for handle in (reversed if rank % 2 else list)([*handles, *gathers]):
        handle.wait()
        assert handle.is_completed()
    same = all(weight.eq(float(number)).all() for number, weight in enumerate(weights)) or view.shard.size == 1
    return (
        [view.own(gradient).clone() for gradient in gradients],
        order,
        bool(same),
        view.shard.rank,
    )


@cuts
def test_many_in_flight(size, instances):
    """In order, none twice, and ranks of different pace neither mix buckets up nor wait for each other for ever."""
    found = pool.run(size, many, instances, timeout=30.0)
    for gradients, order, gathered, shard in found:
        assert order == list(range(16)) and gathered
        for number, gradient in enumerate(gradients):
            whole = expected_sum(size, instances, gradient.numel() * shards_of(size, instances), number)
            assert gradient.equal(whole.view(shards_of(size, instances), -1)[shard]), f"bucket {number}"


def announced(rank, size, instances, dtype):
    groups = pool.groups(instances=instances)
    comm, view = bucket_comm(groups, dtype)
    with groups.heartbeat.record() as calls:
        comm.reduce(view, torch.ones(24), "0").wait()
        comm.gather(view, torch.ones(24, dtype=torch.bfloat16), "0").wait()
    return [(c.op, c.group, c.shape, c.dtype, c.nbytes) for c in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cuts
def test_what_is_recorded(size, instances, dtype):
    name, itemsize, shards = str(dtype).removeprefix("torch."), dtype.itemsize, shards_of(size, instances)
    if shards == 1:
        expected = [("all_reduce", "replicas", (24,), name, 24 * itemsize)]
    else:
        expected = [
            ("reduce_scatter", "shard", (24,), name, 24 * itemsize),
            ("all_gather", "gather", (24 // shards,), "bfloat16", 2 * 24 // shards),
        ]
    assert pool.run(size, announced, instances, dtype) == [expected] * size


def test_one_process_communicates_nothing_and_still_says_that_it_is_done():
    groups, done = pool.groups(), []
    comm, view = bucket_comm(groups)
    full = bucket(0, 64)
    with groups.heartbeat.record() as calls:
        handle = comm.reduce(view, full, "0", lambda: done.append(True))
        assert done == [True] and handle.is_completed()
        handle.wait()
        comm.gather(view, full, "0").wait()
    assert calls == [] and full.equal(bucket(0, 64)) and view.own(full).equal(full)


def an_error_in_then(rank, size):
    """What the waiter of a bucket gets whose `then` raised, and the next bucket's sum."""
    comm, view = bucket_comm(pool.groups(instances=1))

    def broken():
        raise KeyError("a bug")

    first = comm.reduce(view, torch.ones(24), "0", broken)
    after = torch.ones(24)
    second = comm.reduce(view, after, "1")
    second.wait()
    try:
        first.wait()
    except KeyError as error:
        return str(error), view.own(after).unique().tolist()


def test_an_error_beside_compute_is_not_lost():
    assert pool.run(2, an_error_in_then) == [("'a bug'", [2.0])] * 2


# A lost peer: processes of their own, so that no other test meets the broken world.
INTERVAL, TIMEOUT = 0.1, 2.0


def lose_a_peer(what, how, rank, size, port, pipe):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    heartbeat = connect(rank, size, backend="gloo", timeout_seconds=TIMEOUT)
    heartbeat.interval = INTERVAL
    heartbeat.start()
    groups = create_groups(
        Mesh.create(size), rank, heartbeat, TIMEOUT, optimizer_instances=None if what == "all" else 1
    )
    comm, view = bucket_comm(groups)
    start = comm.gather if what == "gather" else comm.reduce
    start(view, torch.ones(24), "0").wait()  # once with everybody: connections are there
    barrier(groups.world)
    if rank == size - 1:
        if how == "dies":
            os._exit(3)
        with heartbeat.phase("long-computation"):
            time.sleep(60)
    handles = [start(view, torch.ones(24), str(n)) for n in range(3)]
    started = time.monotonic()
    try:
        for handle in handles:
            handle.wait()
        pipe.send(("no error", 0.0))
    except CommError as error:
        pipe.send((str(error), time.monotonic() - started))
    time.sleep(60)  # the store lives with rank 0: it must not end before the others have asked


OPS = {"reduce": "reduce_scatter number {} on group shard", "gather": "all_gather number {} on group gather"}
OPS["all"] = "all_reduce number {} on group replicas"
WORDS = {"dies": "rank 2 is gone or frozen (no heartbeat any more", "hangs": "rank 2 has not arrived (phase 'long-"}


@pytest.mark.alone
@pytest.mark.parametrize(("what", "how"), [("reduce", "dies"), ("gather", "hangs"), ("all", "hangs")])
def test_a_lost_peer_is_named(what, how):
    """The message names the collective, its group and ranks, and what became of the missing one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool.PRELOAD)
    size, port, pipes, processes = 3, pool.free_port(), [], []
    for rank in range(size):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=lose_a_peer, args=(what, how, rank, size, port, there), daemon=True))
        processes[-1].start()
    try:
        assert all(pipe.poll(60) for pipe in pipes[:-1]), "a rank never noticed"
        found = [pipe.recv() for pipe in pipes[:-1]]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for message, seconds in found:
        head, _, explanation = message.partition(" failed after ")
        assert re.fullmatch(re.escape(OPS[what]).replace(r"\{\}", r"\d") + r" \(ranks 0, 1, 2\)", head), message
        assert WORDS[how] in explanation and not re.search(r"rank [01]\b", explanation), message
        assert seconds < TIMEOUT + 10, "seconds, not minutes"
