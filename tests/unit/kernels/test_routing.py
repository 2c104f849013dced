"""Routing against rules that are written out with Python's own numbers."""

import math

import pytest
import torch

from megatron.kernels.ops import routing
from megatron.spec.moe import RouterSpec
from tests.unit.kernels.close import assert_same, random

DTYPES = [torch.float32, torch.float64]


def rule(experts=8, topk=2, score_function="softmax", normalized=True, **fields):
    return RouterSpec(16, experts, topk, score_function, normalized, **fields)


def by_hand(row, spec):
    """The k best of a list of numbers, groups first; ties by the lowest index."""
    width = spec.experts // spec.groups
    groups = [row[first : first + width] for first in range(0, spec.experts, width)]
    if spec.group_score == "max":
        of_group = [max(group) for group in groups]
    else:
        best = spec.topk // spec.group_topk
        of_group = [sum(sorted(group, reverse=True)[:best]) for group in groups]
    kept = sorted(range(spec.groups), key=lambda g: (-of_group[g], g))[: spec.group_topk]
    allowed = [i for i in range(spec.experts) if i // width in kept]
    return sorted(allowed, key=lambda i: (-row[i], i))[: spec.topk]


@pytest.mark.parametrize("dtype", DTYPES)
class TestHighest:
    def test_ties_are_broken_by_the_lowest_index(self, dtype):
        values = torch.zeros(5, 64, dtype=dtype)
        assert routing.highest(values, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 5
        values[:, 40] = 1.0
        assert routing.highest(values, 3).tolist() == [[40, 0, 1]] * 5

    def test_signs_and_zeros(self, dtype):
        """Both zeros are one value; negative values are in the right order, down to infinity."""
        inf = math.inf
        values = torch.tensor([-1.0, -0.0, 0.0, -2.0, 3.0, -inf, 1e-40, inf], dtype=dtype)
        assert routing.highest(values, 8).tolist() == [7, 4, 6, 1, 2, 0, 3, 5]

    def test_neighbours_differ(self, dtype):
        """The lowest bit of a value decides before the index does."""
        one = torch.ones((), dtype=dtype)
        above, below = torch.nextafter(one, one * 2), torch.nextafter(one, one * 0)
        assert routing.highest(torch.stack([below, one, above, one]), 4).tolist() == [2, 1, 3, 0]
        assert routing.highest(-torch.stack([below, one, above, one]), 4).tolist() == [0, 1, 3, 2]

    def test_nan_is_the_highest(self, dtype):
        """Nothing fails; the indices are distinct and in range."""
        values = random(3, 8, dtype=dtype)
        values[1, 5] = math.nan
        values[2] = math.nan
        found = routing.highest(values, 3)
        assert found[1, 0] == 5 and found[2].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec",
    [
        rule(),
        rule(topk=1),
        rule(topk=8),
        rule(score_function="sigmoid", topk=4, groups=4, group_topk=2),
        rule(score_function="softmax", topk=3, groups=4, group_topk=3, group_score="max"),
        rule(score_function="sigmoid", topk=6, groups=2, group_topk=2, experts=16),
    ],
    ids=["softmax", "top 1", "all", "sum of groups", "maximum of groups", "all groups"],
)
class TestChoose:
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_by_hand(self, spec, dtype, has_bias):
        """Few different values, so most rows have ties, also between groups."""
        values = (random(300, spec.experts) * 2).round().to(dtype) / 8
        bias = (random(spec.experts, seed=1) * 2).round() / 8 if has_bias else None
        found = routing.choose(values, bias, spec)
        assert found.dtype == torch.int64
        candidates = values if bias is None else values + bias
        assert found.tolist() == [by_hand(row, spec) for row in candidates.tolist()]

    def test_equal_logits_go_to_the_first_experts(self, spec, dtype):
        values = routing.scores(torch.full((4, spec.experts), 0.3, dtype=dtype), spec)
        assert routing.choose(values, None, spec).tolist() == [list(range(spec.topk))] * 4

    def test_rows_do_not_depend_on_each_other(self, spec, dtype):
        values = routing.scores(random(37, spec.experts, dtype=dtype), spec)
        whole = routing.choose(values, None, spec)
        parts = [routing.choose(part, None, spec) for part in values.split([1, 0, 16, 20])]
        assert torch.equal(whole, torch.cat(parts))

    def test_nan(self, spec, dtype):
        values = routing.scores(random(5, spec.experts, dtype=dtype), spec)
        values[2, 3], values[3] = math.nan, math.nan
        found = routing.choose(values, None, spec)
        assert found.min() >= 0 and found.max() < spec.experts
        assert all(len(set(row)) == spec.topk for row in found.tolist())


def test_the_bias_decides_against_the_scores_and_between_groups():
    spec = rule(experts=4, topk=1, score_function="sigmoid", groups=2, group_topk=1)
    values, bias = torch.tensor([[0.9, 0.1, 0.2, 0.3]]), torch.tensor([-2.0, -2.0, 0.0, 0.2])
    assert routing.choose(values, None, spec).item() == 0
    assert routing.choose(values, bias, spec).item() == 3


def test_groups_by_maximum_and_by_sum_differ():
    """DeepSeek-V2 takes the maximum, V3 the sum of the best two."""
    values = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    spec = {score: rule(experts=4, topk=2, groups=2, group_topk=1, group_score=score) for score in ("max", "sum")}
    assert routing.choose(values, None, spec["max"]).tolist() == [[0, 1]]
    assert routing.choose(values, None, spec["sum"]).tolist() == [[2, 3]]


def test_a_softmax_over_the_chosen_scores_groups_by_logits():
    """Probabilities of the logits: the group of the largest has the larger sum, and the smaller sum of logits."""
    logits = torch.tensor([[4.0, -6.0, 1.0, 1.0]])
    sizes = {"experts": 4, "topk": 2, "groups": 2, "group_topk": 1}
    for by_logits, chosen in ((False, [0, 1]), (True, [2, 3])):
        spec = rule(**sizes, normalized=True, by_logits=by_logits)
        found = routing.route(logits, None, spec, None)
        assert found.chosen.tolist() == [chosen]
        expected = logits[:, chosen].softmax(-1)  # over the chosen alone
        torch.testing.assert_close(found.weights, expected)


class TestWeigh:
    @pytest.mark.parametrize("scaling", [1.0, 2.5])
    @pytest.mark.parametrize("normalized", [True, False])
    @pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_through_the_logits(self, dtype, score_function, normalized, scaling):
        """Value and gradient."""
        spec = rule(score_function=score_function, normalized=normalized, scaling=scaling, topk=3)
        logits = random(20, 8, dtype=dtype)
        indices = routing.choose(routing.scores(logits, spec), None, spec)

        def expected(z):
            s = z.exp() / z.exp().sum(-1, keepdim=True) if spec.score_function == "softmax" else 1 / (1 + (-z).exp())
            w = s[torch.arange(20)[:, None], indices]
            return (w / w.sum(-1, keepdim=True) if spec.normalized else w) * spec.scaling

        assert_same(lambda z: routing.weigh(routing.scores(z, spec), indices, spec), expected, [logits])

    def test_softmax_of_the_chosen_logits(self):
        """The rule of Mixtral: top-k first, then softmax."""
        spec, logits = rule(topk=3), random(20, 8)
        indices = routing.choose(routing.scores(logits, spec), None, spec)
        found = routing.weigh(routing.scores(logits, spec), indices, spec)
        torch.testing.assert_close(found, logits.gather(1, indices).softmax(-1))

    @pytest.mark.parametrize("normalized", [True, False])
    def test_not_routed(self, normalized):
        """No weight, and no gradient, of tokens whose indices are -1."""
        spec, logits = rule(normalized=normalized), random(4, 8).requires_grad_()
        indices = torch.tensor([[0, 1], [-1, -1], [3, 2], [-1, -1]])
        weights = routing.weigh(routing.scores(logits, spec), indices, spec)
        assert weights[1].eq(0).all() and weights[0].gt(0).all()
        (grad,) = torch.autograd.grad(weights[:, 0].sum(), logits)
        assert grad[1].eq(0).all() and grad[3].eq(0).all() and grad[0].ne(0).any()

    def test_scores_that_underflow(self):
        logits = torch.full((2, 8), -200.0)
        spec = rule(score_function="sigmoid")
        assert routing.weigh(routing.scores(logits, spec), torch.tensor([[0, 1]] * 2), spec).eq(0).all()


def test_counts_by_sample():
    indices = torch.tensor([[0, 2], [2, 1], [-1, -1], [2, -1]])
    found = routing.counts_by_sample(indices, torch.tensor([0, 1, 1, 1]), 3, 4)
    assert found.dtype == torch.int64
    assert found.tolist() == [[1, 0, 1, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert routing.counts_by_sample(indices[:0], torch.tensor([], dtype=torch.int64), 1, 4).tolist() == [[0] * 4]


@pytest.mark.parametrize(
    "spec",
    [
        rule(),
        rule(experts=12, topk=5),
        rule(experts=6, topk=6),
        rule(experts=16, topk=4, groups=4, group_topk=2),
        rule(experts=20, topk=5, groups=4, group_topk=3),
        rule(experts=12, topk=6, groups=2, group_topk=1),
    ],
    ids=str,
)
class TestBalancedChoice:
    def test_load(self, spec):
        for start in (0, 5, 10**12 + 7):
            found = routing.balanced_choice(torch.arange(start, start + spec.experts), spec)
            assert all(len(set(row)) == spec.topk for row in found.tolist())
            assert torch.bincount(found.flatten(), minlength=spec.experts).tolist() == [spec.topk] * spec.experts

    def test_groups(self, spec):
        found = routing.balanced_choice(torch.arange(50), spec) // (spec.experts // spec.groups)
        assert all(len(set(row)) <= spec.group_topk for row in found.tolist())

    def test_by_number_alone(self, spec):
        numbers = torch.tensor([7, 3, 100, 3])
        expected = [routing.balanced_choice(numbers[i : i + 1], spec)[0].tolist() for i in range(4)]
        assert routing.balanced_choice(numbers, spec).tolist() == expected


def scaled_until_balanced(cost):
    """A table of rows and columns, each column scaled so that all weigh alike, by the definition of Sinkhorn's
    algorithm."""
    columns, error = [1.0] * len(cost[0]), 1.0
    while error > 1e-4:
        rows = [1 / len(cost) / (sum(c * x for c, x in zip(columns, row, strict=True)) + 1e-8) for row in cost]
        before, columns = columns, []
        for number in range(len(before)):
            weight = sum(r * row[number] for r, row in zip(rows, cost, strict=True))
            columns.append(1 / len(before) / (weight + 1e-8))
        error = sum(abs(a - b) for a, b in zip(before, columns, strict=True)) / len(before)
    return [[c * x for c, x in zip(columns, row, strict=True)] for row in cost]


class TestSinkhorn:
    @pytest.mark.parametrize(("topk", "spread"), [(1, 0.1), (2, 2.0), (3, 6.0)])
    def test_by_hand(self, topk, spread):
        logits = random(40, 6) * spread
        scaled = scaled_until_balanced(logits.double().exp().tolist())
        expected = [sorted(range(6), key=lambda i: -row[i])[:topk] for row in scaled]
        assert routing.sinkhorn_choice(logits, None, topk).tolist() == expected

    def test_balances(self):
        """An expert that all tokens prefer gets its share."""
        logits = random(4000, 4) + torch.tensor([3.0, 0.0, 0.0, -3.0])
        load = torch.bincount(routing.sinkhorn_choice(logits, None, 1).flatten(), minlength=4)
        assert load.min() > 900 and load.max() < 1100

    def test_tokens_that_are_not_routed_do_not_count(self):
        logits = random(40, 6) + 3 * torch.arange(6)
        routed = torch.arange(40) % 3 != 0
        found = routing.sinkhorn_choice(logits, routed, 1)
        assert found[routed].tolist() == routing.sinkhorn_choice(logits[routed], None, 1).tolist()
        assert found[routed].tolist() != routing.sinkhorn_choice(logits, None, 1)[routed].tolist()

    def test_equal_tokens_go_to_the_first_experts(self):
        """All experts are equal for them, but for rounding."""
        logits = random(1, 6).expand(24, 6) + random(24, 6, seed=2) * 1e-8
        assert routing.sinkhorn_choice(logits, None, 2).tolist() == [[0, 1]] * 24

    def test_logits_without_an_end(self):
        """Numbers that are not finite, or so far apart that nothing settles, end the rounds."""
        for worst in (float("nan"), float("inf"), 600.0):
            logits = random(8, 4)
            logits[2, 1] = worst
            assert routing.sinkhorn_choice(logits, None, 1).shape == (8, 1)


def test_a_balanced_token_visits_as_many_ranks_as_it_can():
    """Eight experts per rank: four experts per token are on four ranks."""
    found = routing.balanced_choice(torch.arange(100), rule(experts=32, topk=4)) // 8
    assert all(len(set(row)) == 4 for row in found.tolist())


class TestCapacity:
    @staticmethod
    def by_hand(indices, weights, samples, positions, capacity, policy):
        kept = [[False] * len(row) for row in indices]
        queues = {}
        for token, row in enumerate(indices):
            for slot, expert in enumerate(row):
                if expert >= 0:
                    preference = -weights[token][slot] if policy == "probs" else 0
                    entry = (preference, positions[token], token, slot)
                    queues.setdefault((samples[token], expert), []).append(entry)
        for queue in queues.values():
            for _, _, token, slot in sorted(queue)[:capacity]:
                kept[token][slot] = True
        return kept

    @pytest.mark.parametrize("policy", ["probs", "position"])
    @pytest.mark.parametrize("capacity", [1, 3, 7, 100])
    @pytest.mark.parametrize("seed", range(3))
    def test_by_hand(self, policy, capacity, seed):
        """Shuffled tokens of three samples, few different weights, some tokens not routed; a sample without tokens."""
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(120, generator=generator)
        samples, positions = torch.tensor([0, 1, 3]).repeat(40)[shuffled], (torch.arange(120) // 3)[shuffled]
        weights = (random(120, 2, seed=seed) * 2).round() / 4
        indices = routing.choose(random(120, 6, seed=seed), None, rule(experts=6))
        indices[torch.rand(120, generator=generator) < 0.1] = -1
        indices[5, 1] = -1
        found = routing.within_capacity(
            indices, weights, samples, positions, experts=6, capacity=capacity, policy=policy
        )
        expected = self.by_hand(*(t.tolist() for t in (indices, weights, samples, positions)), capacity, policy)
        assert found.tolist() == expected
        counts = routing.counts_by_sample(indices.masked_fill(~found, -1), samples, 4, 6)
        wanted = routing.counts_by_sample(indices, samples, 4, 6)
        assert torch.equal(counts, wanted.clamp(max=capacity))

    def test_rounding_does_not_decide_between_equal_tokens(self):
        """Six tokens of one expert with room for three: the weights of the first five differ in their last bits."""
        weights = torch.tensor([[0.3], [0.3], [0.3], [0.3], [0.3], [0.31]])
        for seed in range(20):
            last_bits = torch.randint(-2, 3, (6, 1), generator=torch.Generator().manual_seed(seed))
            rounded = (weights.view(torch.int32) + last_bits.int()).view(torch.float32)
            sizes = {"experts": 1, "capacity": 3, "policy": "probs"}
            places = torch.zeros(6, 1).long(), rounded, torch.zeros(6).long(), torch.arange(6)
            found = routing.within_capacity(*places, **sizes)
            assert found.flatten().tolist() == [True, True, False, False, False, True]
            margins = routing.capacity_margins(*places, **sizes).flatten()
            assert (margins[:5] < 1e-30).all() and margins[5] == pytest.approx(0.01 / 0.31, rel=1e-2)

    def test_margins(self):
        """Of the assignments on both sides of a capacity of two, in units of their weights."""
        places = torch.tensor([[0], [0], [0], [0], [1], [-1]]), torch.tensor([[0.1], [0.4], [0.2], [0.3], [0.9], [0.9]])
        tokens = torch.zeros(6).long(), torch.arange(6)
        found = routing.capacity_margins(*places, *tokens, experts=2, capacity=2, policy="probs").flatten()
        expected = torch.tensor([0.2 / 0.1, 0.2 / 0.4, 0.1 / 0.2, 0.1 / 0.3, math.inf, math.inf])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
        found = routing.capacity_margins(*places, *tokens, experts=2, capacity=2, policy="position")
        assert found.isinf().all()

    def test_no_tokens(self):
        nothing = torch.empty(0, dtype=torch.int64)
        found = routing.within_capacity(
            nothing.view(0, 2), torch.empty(0, 2), nothing, nothing, experts=6, capacity=1, policy="probs"
        )
        assert found.shape == (0, 2)
