"""Documents on groups of ranks: all of them, within the limits, without a wait, and with equal work."""

import numpy as np
import pytest

from benchmarks.context_assignment import MIXES, measured
from megatron.config.context_parallel import GroupSizes
from megatron.core.context_parallel.assignment import Share, assign, of_rank

BALANCED = 1.10  # work of the busiest rank over the mean


def work(length):
    return length * (length + 100)


def sizes_of(ranks, smallest=1, tokens=64):
    return GroupSizes(ranks, smallest, ranks & -ranks, tokens)


def drawn(sizes, seed):
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(0, np.log(sizes.longest), random.integers(1, 60)))
    return [*np.ceil(lengths).astype(int).tolist(), sizes.longest]


DRAWN = [
    pytest.param(sizes, drawn(sizes, seed), id=f"{sizes.ranks} ranks from {sizes.smallest}, {seed}")
    for sizes in (sizes_of(1), sizes_of(4), sizes_of(6), sizes_of(8, 2), sizes_of(12, 4), sizes_of(32))
    for seed in range(4)
]


@pytest.mark.parametrize(("sizes", "lengths"), DRAWN)
def test_every_document_is_on_a_group_that_holds_it(sizes, lengths):
    slots = assign(lengths, sizes, work)
    for slot in slots:
        assert [rank for first, size, _ in slot for rank in range(first, first + size)] == list(range(sizes.ranks))
        for first, size, documents in slot:
            assert size in sizes.all and first % size == 0
            assert sum(lengths[number] for number in documents) <= sizes.tokens * size
            assert len(documents) == 1 or size == sizes.smallest, "zig-zag balances one document"
    numbers = [number for slot in slots for share in slot for number in share.documents]
    assert sorted(numbers) == list(range(len(lengths)))


@pytest.mark.parametrize(("sizes", "lengths"), DRAWN)
def test_no_rank_of_a_wide_group_waits(sizes, lengths):
    before = [0.0] * sizes.ranks
    for slot in assign(lengths, sizes, work):
        for first, size, documents in slot:
            ranks = range(first, first + size)
            assert size == sizes.smallest or len({before[rank] for rank in ranks}) == 1
            for rank in ranks:
                before[rank] += sum(work(lengths[number]) for number in documents) / size


def test_a_rank_sees_its_own_groups():
    slots = [[Share(0, 2, (3,)), Share(2, 1, (0, 1)), Share(3, 1, ())], [Share(0, 4, (2,))]]
    assert of_rank(slots, 1) == [Share(0, 2, (3,)), Share(0, 4, (2,))]
    assert of_rank(slots, 3) == [Share(3, 1, ()), Share(0, 4, (2,))]


def test_no_document_leaves_every_rank_idle():
    assert assign([], sizes_of(4, 2), work) == [[Share(0, 2, ()), Share(2, 2, ())]]


def test_a_document_with_too_much_work_gets_more_ranks_than_its_length_needs():
    (slot,) = assign([60], sizes_of(4), work)
    assert slot == [Share(0, 4, (0,))]
    slots = assign([60, 60, 60, 60], sizes_of(4), work)
    assert slots == [[Share(rank, 1, (rank,)) for rank in range(4)]]


def test_the_order_of_the_input_decides_between_equal_documents_only():
    lengths = drawn(sizes_of(8), 5)
    loads = [
        sorted(
            sum(sum(work(ordered[number]) for number in share.documents) / share.size for share in of_rank(slots, rank))
            for rank in range(8)
        )
        for ordered in (lengths, lengths[::-1])
        for slots in [assign(ordered, sizes_of(8), work)]
    ]
    assert loads[0] == pytest.approx(loads[1])


@pytest.mark.parametrize("mix", MIXES, ids=[mix.name for mix in MIXES])
def test_work_is_equal_where_packing_leaves_ranks_idle(mix):
    packed, packed_waiting, groups, groups_waiting = measured(mix).T
    assert groups.max() <= BALANCED < packed.max()
    assert groups_waiting.mean() < packed_waiting.mean()
