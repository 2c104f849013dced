"""Planted mistakes, most of which the ordinary CPU runtime hides, are found and named by operation, kernel and line."""

import contextlib
from unittest import mock

import pytest

from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.param_gatherer import ParamGatherer
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostBlock
from megatron.core.offload.saved_tensors import StorageGroup
from megatron.core.optimizer.offloaded_states import OffloadedStates
from tests import pool
from tests.adversary.runs import configured, trained
from tests.adversary.runtime import LATE, SHUFFLED


def reads_at_once(gatherer, parameter):
    """A dropped wait: parameters are read while they are gathered."""
    bucket = gatherer._bucket_of.get(id(parameter))
    if bucket is not None:
        gatherer._gathering.pop(bucket.index, None)


def reuses_blocks_at_once(data_parallel, size):
    """A reused buffer: gradients are written to memory that is still reduced."""
    while data_parallel._reductions:
        block, _ = data_parallel._reductions.popleft()
        data_parallel._blocks.give_back(block)
    return data_parallel._blocks.take(size)


def waits_for_the_offload(group, storages, block, plain=StorageGroup._start_reload):
    """A wrong event: readers wait for the copy to the host, which is over, and not for the reload."""
    storages, offload = list(storages), block.last_copy
    plain(group, storages, block)
    for storage in storages:
        storage.reload = offload


def refills_at_once(states, number, plain=OffloadedStates._fetch):
    """An event that is missing between two copies: a buffer is filled while it is still copied from."""
    with mock.patch.object(states, "_stored", [None] * len(states._stored)):
        plain(states, number)


def keeps_nothing(copies, stream, name, pairs, block, after, plain=CopyEngine._start):
    """Nothing holds the tensors of a copy."""
    careless = mock.Mock()
    careless.run = lambda function, name, *, after, keep: stream.run(function, name, after=after)
    return plain(copies, careless, name, pairs, block, after)


def frees_before_the_wait(group):
    """Memory is freed while it is copied to the host."""
    offload, group._offload = group._offload, None
    if offload is not None:
        for storage in group._storages:
            storage.device_bytes = None
        offload.wait()


def waits_on_the_device(block):
    """The host reads memory for which the device alone waits."""
    if block.last_copy is not None:
        block.last_copy.wait()


# name -> (a run, what is replaced, parts of the message)
BUGS = {
    "a dropped wait": (
        "dp overlapped",
        [(ParamGatherer, "before_read", reads_at_once)],
        ("compute reads", "all-gather: bucket"),
    ),
    "a reused buffer": (
        "dp optim_grads",
        [(DataParallel, "_take_block", reuses_blocks_at_once)],
        ("compute writes", "reduce: bucket"),
    ),
    "a wrong event": (
        "cpu offload",
        [(StorageGroup, "_start_reload", waits_for_the_offload)],
        ("compute reads", "reload: 0 of stage 0"),
    ),
    "an event that is missing between copies": (
        "dp states offloaded",
        [(OffloadedStates, "_fetch", refills_at_once)],
        ("reload: states of bucket", "no event orders the two"),
    ),
    "memory that is freed early": (
        "cpu offload",
        [(CopyEngine, "_start", keeps_nothing), (StorageGroup, "finish_offload", frees_before_the_wait)],
        ("a tensor of offload: 0 of stage 0", "freed before it was waited for"),
    ),
    "a wait of the wrong side": (
        "dp weights offloaded",
        [(HostBlock, "synchronize", waits_on_the_device)],
        ("the host reads", "offload: weights of bucket"),
    ),
}


def with_bug(rank, size, run, mode, name):
    with contextlib.ExitStack() as stack:
        for owner, method, wrong in BUGS[name][1]:
            stack.enter_context(mock.patch.object(owner, method, wrong))
        trained(rank, size, run, mode)


@pytest.mark.parametrize("mode", [LATE, pytest.param(SHUFFLED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUGS)
def test_is_found_and_named(name, mode):
    case, _, parts = BUGS[name]
    world, run = configured(case)
    with pytest.raises(AssertionError) as found:
        pool.run(world, with_bug, run, mode, name)
    for report in str(found.value).split("--- rank")[world > 1 :]:
        assert all(part in report for part in parts), report
