"""The exchange of tokens between the ranks that share experts."""

import pytest
import torch

from megatron.core.comm.all_to_all import all_to_all_v, all_to_all_v_async
from tests import pool
from tests.adversary.runtime import LATE, SHUFFLED
from tests.adversary.seams import adversary

# Rows from rank (first) to rank (second), by number of ranks: even, uneven, and with ranks that send or receive none.
SPLITS = {
    "even": lambda source, to: 2,
    "uneven": lambda source, to: (3 * source + 5 * to) % 4,
    "all to the last": lambda source, to: 4 * (to == 1),
    "all from the first": lambda source, to: 3 * (source == 0),
    "none": lambda source, to: 0,
}


def rows_of(source, to, rows, *shape):
    """Rows that tell where they come from and go to."""
    number = torch.arange(rows * torch.Size(shape).numel(), dtype=torch.float32).view(rows, *shape)
    return number + 1000 * source + 100 * to


def exchanged(rank, size, name, mode):
    """(what arrived, what should have, whether the input is unchanged, the calls)"""
    split, found = SPLITS[name], []
    group = pool.groups(ep=size, etp=1, experts=True).etp_ep
    send, receive = [split(rank, to) for to in range(size)], [split(source, rank) for source in range(size)]
    with group.heartbeat.record() as calls:
        for shape in ((3,), (), (2, 2)):
            mine = torch.cat([rows_of(rank, to, send[to], *shape) for to in range(size)])
            expected = torch.cat([rows_of(source, rank, receive[source], *shape) for source in range(size)])
            before = mine.clone()
            if mode is None:
                found.append((all_to_all_v(mine, send, receive, group), expected, mine, before))
                continue
            with adversary(mode, seed=rank):
                received, handle = all_to_all_v_async(mine, send, receive, group)
                second, other = all_to_all_v_async(mine, send, receive, group)
                other.wait()
                handle.wait()
                assert received.equal(second)
                found.append((received, expected, mine, before))
    assert all(received.equal(expected) and mine.equal(before) for received, expected, mine, before in found)
    return [(call.op, call.group, call.nbytes) for call in calls], sum(send)


@pytest.mark.parametrize("mode", [None, LATE, SHUFFLED], ids=str)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("size", [2, 4])
def test_rows_arrive_in_rank_order(size, name, mode):
    for calls, sent in pool.run(size, exchanged, name, mode):
        counted = [("all_to_all_v", "etp_ep", 4 * sent * width) for width in (3, 1, 4)]
        assert calls == (counted if mode is None else [call for call in counted for _ in range(2)])


def test_a_group_of_one_exchanges_nothing():
    group, x = pool.groups(experts=True).etp_ep, torch.ones(3, 2)
    with group.heartbeat.record() as calls:
        assert all_to_all_v(x, [3], [3], group) is x
    assert calls == []
