"""The rows of a rank with experts, against choices that are drawn, and against hand counts."""

import itertools
import math

import pytest
import torch

from megatron.kernels.ops.routing import balanced_choice, choose
from megatron.spec.expert_rows import WORST, expected_ranks, expert_rows
from megatron.spec.moe import RouterSpec


def router(experts, topk, groups=1, group_topk=1, group_score="max"):
    return RouterSpec(
        8, experts, topk, "softmax", normalized=True, groups=groups, group_topk=group_topk, group_score=group_score
    )


def ranks_of(spec, ranks, scores):
    """The mean number of ranks with an expert of a token, over rows of scores."""
    owners = (choose(scores, None, spec) // (spec.experts // ranks)).sort(dim=1).values
    return 1 + (owners.diff(dim=1) > 0).sum().item() / len(scores)


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        (router(6, 2), 1), (router(6, 2), 3), (router(6, 3), 2), (router(6, 2, 3, 2), 3), (router(6, 3, 3, 2), 6),
        (router(6, 4, 3, 2), 3), (router(6, 4, 3, 3), 6), (router(6, 1, 3, 2), 3), (router(6, 2, 2, 1), 2),
        (router(6, 3, 2, 2), 6), (router(6, 3, 6, 4), 3), (router(6, 3, 6, 4), 2),
    ],
)  # fmt: skip
def test_expected_ranks_are_the_mean_over_all_orders_of_the_experts(spec, ranks):
    orders = torch.tensor(list(itertools.permutations(range(spec.experts))), dtype=torch.float32)
    expected = expected_ranks(spec.experts, spec.topk, ranks, groups=spec.groups, chosen=spec.group_topk)
    assert expected == pytest.approx(ranks_of(spec, ranks, orders))


def test_known_shares():
    assert [round(expected_ranks(128, 8, n) / 8, 2) for n in (2, 4, 8, 16)] == [0.25, 0.45, 0.67, 0.82]
    assert expected_ranks(256, 8, 64) / 8 == pytest.approx(0.96, abs=0.005)


def test_one_rank_receives_nothing_but_its_own_rows():
    for imbalance in (1.0, 3.0, WORST):
        load = expert_rows(router(8, 2), 100, ep=1, etp=1, imbalance=imbalance)
        assert (load.ranks, load.sent, load.received, load.assigned, load.worked) == (1, 100, 100, 200, 200)
        assert load.largest == min(100, 25 * imbalance)


def test_shards_of_experts_get_the_rows_of_all_their_ranks():
    load = expert_rows(router(8, 2), 100, ep=1, etp=2)
    assert (load.ranks, load.sent, load.received, load.worked, load.largest) == (2, 200, 200, 400, 50)
    load = expert_rows(router(8, 2), 100, ep=2, etp=2)
    copies = 2 * (1 - math.comb(4, 2) / math.comb(8, 2))
    assert (load.sent, load.received, load.worked) == (round(200 * copies), round(200 * copies), 400)


def test_the_fullest_rank_has_at_most_every_token_at_each_of_its_experts():
    load = expert_rows(router(8, 4), 100, ep=4, etp=1, imbalance=WORST)
    assert (load.received, load.worked, load.largest) == (400, 800, 400)
    more = expert_rows(router(8, 4), 100, ep=4, etp=1, imbalance=1.25)
    assert (more.worked, more.largest) == (500, 250)
    assert more.received == round(1.25 * more.sent) == 392


@pytest.mark.parametrize(
    ("spec", "ep", "copies"),
    [(router(128, 8), 4, 4), (router(128, 8), 16, 8), (router(16, 4, 4, 2), 4, 2), (router(16, 4, 2, 1), 4, 2)],
)
def test_experts_in_turn_are_on_as_many_ranks_as_possible(spec, ep, copies):
    load = expert_rows(spec, 100, ep=ep, etp=1, evenly=True)
    assert load.received == load.sent == 100 * copies and load.worked == 100 * spec.topk


# A sum of scores is no matter of their order alone.
@pytest.mark.parametrize(
    ("spec", "ranks", "within"),
    [
        (router(128, 8), 8, 0.005),
        (router(64, 6, 8, 3), 8, 0.005),
        (router(160, 6, 8, 3), 16, 0.005),
        (router(256, 8, 8, 4), 4, 0.005),
        (router(64, 6, 8, 3, "sum"), 8, 0.015),
        (router(160, 6, 8, 3, "sum"), 16, 0.02),
        (router(256, 8, 8, 4, "sum"), 32, 0.015),
    ],
)
def test_choices_of_random_scores_go_to_as_many_ranks(spec, ranks, within):
    scores = torch.rand(4096, spec.experts, generator=torch.Generator().manual_seed(5))
    sent = expert_rows(spec, 4096, ep=ranks, etp=1).sent
    assert 4096 * ranks_of(spec, ranks, scores) == pytest.approx(sent, rel=within)


def test_experts_in_turn_are_the_choices_that_balance():
    for spec, ep in ((router(128, 8), 4), (router(64, 6, 8, 3), 8), (router(16, 4, 2, 1), 4)):
        owners = balanced_choice(torch.arange(4 * spec.experts), spec) // (spec.experts // ep)
        ranks = torch.nn.functional.one_hot(owners, ep).amax(dim=1).sum().item()
        assert ranks == expert_rows(spec, 4 * spec.experts, ep=ep, etp=1, evenly=True).sent
