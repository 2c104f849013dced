"""Ranks of one attempt find each other over a store that still holds the keys of the attempts before."""

import random
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from megatron.base.errors import CommError
from megatron.base.rendezvous import agree_on_attempt, release_spares, wait_for_release


def agree(store, world_size, order):
    """The name that each rank arrives at when the ranks start in this order; None for one that did not start."""
    names = [None] * world_size

    def join(rank):
        names[rank] = agree_on_attempt(store, rank, world_size, timeout_seconds=10)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.002)
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_attempt_has_a_name_of_its_own(world_size):
    store, seen, rng = HashStore(), set(), random.Random(world_size)
    for _ in range(6):
        names = agree(store, world_size, rng.sample(range(world_size), world_size))
        assert len(set(names)) == 1 and names[0] not in seen
        seen.add(names[0])


def test_an_attempt_that_died_while_its_ranks_met_does_not_disturb_the_next():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError):
        agree_on_attempt(store, 0, 3, timeout_seconds=0.2)  # the other ranks of this attempt never came
    store.set_timeout(timedelta(seconds=10))
    for order in ([1, 2, 0], [2, 0, 1]):  # 1 and 2 may find the dead attempt's name first
        assert len(set(agree(store, 3, order))) == 1


def test_a_rank_that_nobody_welcomes_gives_up():
    store = HashStore()
    agree(store, 2, [0, 1])
    with pytest.raises(CommError, match=r"rank 0 did not answer within 0\.1 s"):
        agree_on_attempt(store, 1, 2, timeout_seconds=0.1)


def test_spares_wait_until_the_run_ends_or_they_are_told_to_stop():
    store, ended = HashStore(), []

    def wait(rank, stops):
        wait_for_release(store, rank, stops)
        ended.append(rank)

    told = threading.Event()
    threads = [threading.Thread(target=wait, args=(rank, told.is_set if rank == 3 else bool)) for rank in (2, 3)]
    for thread in threads:
        thread.start()
    told.set()
    threads[1].join(10)
    assert ended == [3] and threads[0].is_alive()
    release_spares(store, [2])  # returns when rank 2 has seen it
    threads[0].join(10)
    assert ended == [3, 2]


def test_a_spare_ends_with_an_error_when_the_attempt_is_over():
    class Lost(HashStore):
        def check(self, keys):
            raise RuntimeError("Broken pipe")

    with pytest.raises(CommError, match="waited as a spare, and the attempt it waited for is over: Broken pipe"):
        wait_for_release(Lost(), 2, bool)
