"""Plans against the rule that they follow, applied one token at a time."""

import itertools
import math

import pytest
import torch

from megatron.core.expert_parallel.plan import local_plan, make_plan, outgoing, read_counts
from megatron.kernels.ops.assignments import assign
from megatron.tooling.host_reads import host_reads


def routing(tokens, k, experts, *, absent=0.0, seed=0):
    """Random different experts for each token, of which a part is -1."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    indices = scores.topk(k).indices
    return indices.masked_fill(torch.rand(tokens, k, generator=generator) < absent, -1)


def plans(routings, experts, ep, etp):
    """The plans of all ranks: `routings` has the indices of each."""
    outs = [outgoing(indices, experts, ep) for indices in routings]
    counts = [out.counts.repeat_interleave(etp, dim=0) for out in outs]
    return [
        make_plan(out, torch.stack([each[rank] for each in counts]), len(routings[rank]), etp, read_counts)
        for rank, out in enumerate(outs)
    ]


def arrived(plans, tensors, counts):
    """tensors: what each rank sends, its rows for all ranks; counts: of a plan, by name -> what each rank receives."""
    sent = [tensor.split(getattr(plan, counts)) for plan, tensor in zip(plans, tensors, strict=True)]
    return [torch.cat([parts[rank] for parts in sent]) for rank in range(len(plans))]


def pairs_by_rule(indices, experts, ep):
    """For each ep rank (its tokens, its assignments as (expert, token, slot)), in order."""
    found, local = [], experts // ep
    for owner in range(ep):
        mine = [
            (int(expert), token, slot)
            for token, row in enumerate(indices)
            for slot, expert in enumerate(row)
            if expert >= 0 and expert // local == owner
        ]
        found.append((sorted({token for _, token, _ in mine}), sorted(mine)))
    return found


def test_by_hand():
    """Four experts on two ranks; tokens of rank 0 for experts {0, 1}, {1, 2}, {3, 2}, none on rank 1."""
    indices = torch.tensor([[0, 1], [1, 2], [3, 2]])
    out = outgoing(indices, 4, 2)
    assert out.counts.tolist() == [[1, 2, 2], [2, 1, 2]] and out.counts.dtype == torch.int32
    first, second = plans([indices, indices[:0]], 4, 2, 1)
    assert first.tokens.tolist() == [0, 1, 1, 2]
    assert first.rows.tolist() == [0, 0, 1, 0, 1, 1] and first.rows.dtype == torch.int32
    assert first.positions.tolist() == [0, 1, 2, 3, 5, 4]
    assert (first.send_rows, first.receive_rows) == ([2, 2], [2, 0])
    assert (first.send_assignments, first.receive_assignments) == ([3, 3], [3, 0])
    assert (second.send_rows, second.receive_rows, second.receive_assignments) == ([0, 0], [2, 0], [3, 0])
    assert second.tokens.shape == second.positions.shape == (0,)
    found = second.assignments(torch.tensor([0, 1, 1], dtype=torch.int32))
    assert found.sizes == [2, 1] and found.rows.tolist() == [0, 1, 1] and found.rows.dtype == torch.int64


CASES = {
    # tokens of the ranks of ep, experts, k, ep, part that is -1
    "one rank": ((5,), 4, 2, 1, 0.0),
    "two ranks": ((7, 7), 8, 3, 2, 0.0),
    "ranks without tokens": ((0, 9, 0, 4), 8, 2, 4, 0.0),
    "one expert per rank": ((6, 5, 4), 3, 2, 3, 0.3),
    "all experts": ((4, 6), 6, 6, 2, 0.0),
    "all absent": ((4, 6), 6, 3, 2, 1.0),
    "few routed": ((9, 9), 16, 4, 2, 0.8),
    "one token": ((1, 0), 2, 1, 2, 0.0),
}


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_by_the_rule(case, etp):
    tokens, experts, k, ep, absent = CASES[case]
    local, ranks = experts // ep, list(itertools.product(range(ep), range(etp)))
    # Every rank of etp x ep has its own tokens.
    routings = [routing(tokens[e], k, experts, absent=absent, seed=10 * e + t) for e, t in ranks]
    by_rule = [pairs_by_rule(indices, experts, ep) for indices in routings]
    made = plans(routings, experts, ep, etp)
    for plan, sent in zip(made, by_rule, strict=True):
        assert plan.tokens.tolist() == [token for mine, _ in sent for _ in range(etp) for token in mine]
        assert plan.positions.tolist() == [token * k + slot for _, mine in sent for _, token, slot in mine]
        assert plan.rows.tolist() == [have.index(token) for have, mine in sent for _, token, _ in mine]
        assert plan.send_rows == [len(have) for have, _ in sent for _ in range(etp)]
        assert plan.send_assignments == [len(mine) for _, mine in sent for _ in range(etp)]
    rows = arrived(
        made,
        [
            torch.cat([part for part in plan.rows.split(plan.send_assignments[::etp]) for _ in range(etp)])
            for plan in made
        ],
        "send_assignments",
    )
    for (e, _), plan, received in zip(ranks, made, rows, strict=True):
        expected = []  # (expert, source, row) of each assignment
        first, starts = 0, []
        for source, sent in enumerate(by_rule):
            have, mine = sent[e]
            starts.append(first)
            first += len(have)
            expected += [(expert, source, have.index(token)) for expert, token, _ in mine]
        expected.sort()
        found = plan.assignments(received)
        assert found.rows.tolist() == [starts[source] + row for _, source, row in expected]
        assert found.sizes == [sum(each[0] == e * local + n for each in expected) for n in range(local)]
        assert plan.receive_rows == [len(sent[e][0]) for sent in by_rule]
        assert plan.receive_assignments == [len(sent[e][1]) for sent in by_rule]
        assert plan.order.sort().values.tolist() == list(range(len(expected)))


@pytest.mark.parametrize(("first", "number"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_of_rows_that_are_here(tokens, first, number):
    indices = routing(tokens, 3, 6, absent=0.2)
    plan = local_plan(indices, first, number, assign, read_counts)
    expected = sorted(
        (int(expert), token, slot)
        for token, row in enumerate(indices)
        for slot, expert in enumerate(row)
        if first <= expert < first + number
    )
    assert plan.positions.tolist() == [token * 3 + slot for _, token, slot in expected]
    assert plan.assignments.rows.tolist() == [token for _, token, _ in expected]
    assert plan.assignments.sizes == [sum(each[0] == first + n for each in expected) for n in range(number)]


@pytest.mark.parametrize("tokens", [0, 9])
def test_the_host_waits_for_no_whole_indices(tokens):
    """Where every assignment stands, their number is known; how many each expert has is read when it is needed,
    once."""
    indices = routing(tokens, 3, 6)
    expected = local_plan(indices, 0, 6, assign, read_counts)
    with host_reads() as reads:
        plan = local_plan(indices, 0, 6, assign, read_counts, whole=True)
        assert reads == [] and len(plan.assignments.sizes) == 6
        assert list(plan.assignments.sizes) == expected.assignments.sizes == list(plan.assignments.sizes)
    assert len(reads) == 1
    assert plan.positions.equal(expected.positions) and plan.assignments.rows.equal(expected.assignments.rows)


def test_one_copy_per_rank_saves_a_third():
    """8 of 128 experts, chosen evenly, over 8 ranks: 0.67 of the rows that one copy per expert would be."""
    tokens, k, experts, ep = 4000, 8, 128, 8
    sent = int(outgoing(routing(tokens, k, experts), experts, ep).counts[:, -1].sum())
    expected = ep * (1 - math.comb(experts - experts // ep, k) / math.comb(experts, k)) / k
    assert expected == pytest.approx(0.67, abs=0.005)
    assert sent / (tokens * k) == pytest.approx(expected, abs=0.005)
