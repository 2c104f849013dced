"""The kernels of experts in Triton's interpreter against their references; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.kernels import choose_experts, fused
from megatron.kernels.backends.triton import assign as triton_assign
from megatron.kernels.backends.triton import assigned_rows, expert_weight_grad, weighted_activation
from megatron.kernels.backends.triton import routing as triton_routing
from megatron.kernels.ops import activation, routing, weight_grad
from megatron.kernels.ops import assignments as assignments_ops
from megatron.kernels.ops.assignments import SEPARATE, Assignments, Picked, row_order
from megatron.kernels.ops.expert_weight_grad import one_by_one
from megatron.kernels.ops.weighted_activation import Separate
from megatron.spec.moe import RouterSpec
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices
from tests.unit.kernels.triton.near import assert_near

CPU = torch.device("cpu")
CASES = ["uniform", "skew", "all", "ragged", "none"]
ROWS, E = 70, 5


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (40, 136), (264, 24)])
class TestWeightGrad:
    def compare(self, case, outputs, inputs, overwrite, operands):
        assignments = assign(choices(case, ROWS, E), E)
        grads, values = operands(assignments)
        before = torch.full((E, outputs, inputs), float("nan")) if overwrite else random(E, outputs, inputs, seed=2)
        results = []
        for kernel in (expert_weight_grad.write_weight_grads, one_by_one(weight_grad.fused)):
            results.append(before.clone())
            kernel(results[-1], grads, values, assignments, overwrite)
        assert_near(*([each] for each in results))

    def test_rows_that_are_picked(self, case, outputs, inputs, overwrite):
        """As those of the first product, whose input is picked, and of the second one, whose gradient is."""

        def first(assignments):
            count = len(assignments.rows)
            return Picked(random(count, outputs), None), Picked(random(ROWS, inputs, seed=1), assignments.rows)

        def second(assignments):
            count = len(assignments.rows)
            return Picked(random(ROWS, outputs), assignments.rows), Picked(random(count, inputs, seed=1), None)

        self.compare(case, outputs, inputs, overwrite, first)
        self.compare(case, outputs, inputs, overwrite, second)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [40, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_and_their_sums(case, width, dtype):
    """The same bits: the order of a sum is the same."""
    assignments = assign(choices(case, ROWS, E), E)
    rows, values = (random(n, width, dtype=dtype, seed=n) for n in (ROWS, len(assignments.rows)))
    found, expected = (
        (kernels.gather(rows, assignments.rows), kernels.add_up(values, row_order(assignments, ROWS)))
        for kernels in (assigned_rows, SEPARATE)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
class TestWeightedActivation:
    def run(self, kernel, inner, grad, weights, *, wants_inner=True, wants_product=True):
        again = []
        gradients = kernel.gradient(
            grad.clone(), inner, None, weights, take=again.append if wants_product else None, wants_inner=wants_inner
        )
        return [kernel.product(inner, None, weights), *again, *gradients]

    @pytest.mark.parametrize(("count", "width"), [(5, 33), (3, 2100), (0, 8), (1, 1)])
    def test_parity(self, name, dtype, count, width):
        found, expected = getattr(weighted_activation, name), Separate(getattr(activation, name))
        given = random(count, 2 * width, dtype=dtype), random(count, width, dtype=dtype, seed=1), random(count, seed=2)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3  # a bit more or less where a sum is rounded
        assert_near(self.run(found, *given), self.run(expected, *given), tolerance)

    def test_what_is_not_wanted(self, name, dtype):
        kernel = getattr(weighted_activation, name)
        given = random(4, 16, dtype=dtype), random(4, 8, dtype=dtype, seed=1), random(4, seed=2)
        product, again, grad_inner, grad_weights = self.run(kernel, *given)
        assert torch.equal(product, again)
        assert_near(self.run(kernel, *given, wants_inner=False), [product, again, None, grad_weights])
        assert_near(self.run(kernel, *given, wants_product=False), [product, grad_inner, grad_weights])


@pytest.mark.parametrize("experts", [8, 21, 130])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
class TestRouter:
    def rule(self, experts, score_function, normalized):
        return RouterSpec(16, experts, 3, score_function, normalized, scaling=1.5)

    @pytest.mark.parametrize("has_bias", [True, False])
    def test_choice_and_weights(self, experts, score_function, normalized, has_bias):
        """With few different logits, so that most tokens have ties."""
        rule = self.rule(experts, score_function, normalized)
        bias = (random(experts, seed=1) * 2).round() / 8 if has_bias else None
        for logits in ((random(70, experts) * 2).round() / 4, random(70, experts, scale=30.0), random(0, experts)):
            found, expected = triton_routing.route(logits, bias, rule, None), routing.route(logits, bias, rule, None)
            assert_near(found, expected)
            assert torch.equal(found.chosen, expected.chosen)
            again = triton_routing.route(logits, bias, rule, expected.chosen)
            assert torch.equal(again.weights, found.weights) and torch.equal(again.chosen, found.chosen)

    @pytest.mark.parametrize("priced", [True, False])
    @pytest.mark.parametrize("has_z", [True, False])
    @pytest.mark.parametrize("padded", [True, False])
    def test_gradient(self, experts, score_function, normalized, priced, has_z, padded):
        """With an assignment that is given and to no expert."""
        rule, logits = self.rule(experts, score_function, normalized), random(22, experts)
        chosen = routing.route(logits, None, rule, None).chosen
        chosen[3, 1] = chosen[4] = -1
        terms = {
            "prices": random(2, experts, seed=2) if priced else None,
            "z_weight": torch.tensor(0.7) if has_z else None,
            "routed": random(22, seed=3) > 0 if padded else None,
        }
        found, expected = (
            each.gradient(logits, chosen, random(22, 3, seed=1), rule, **terms) for each in (triton_routing, routing)
        )
        assert_near([found], [expected], 3e-6)
        weights = [each.route(logits, None, rule, chosen).weights for each in (triton_routing, routing)]
        assert_near(weights[:1], weights[1:])


@pytest.mark.parametrize(
    ("experts", "k", "first", "here"), [(8, 2, 0, 8), (21, 3, 5, 7), (130, 8, 0, 130), (4, 4, 3, 1)]
)
@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_order(experts, k, first, here, tokens, absent):
    """Stable by expert, and by row in the order of the experts."""
    indices = random(tokens, experts).topk(k).indices
    indices = indices.masked_fill(random(tokens, k, seed=1).abs() < 5 * absent**3, -1)
    found, expected = (each.assign(indices, first, here) for each in (triton_assign, assignments_ops))
    total = int(expected.ends[-1])
    for name in ("counts", "ends"):
        assert torch.equal(getattr(found, name), getattr(expected, name).int())
    for name in ("positions", "rows"):
        assert torch.equal(getattr(found, name)[:total], getattr(expected, name)[:total])
    by_row = row_order(Assignments(expected.rows[:total], expected.ends, []), tokens)
    assert torch.equal(found.by_row.order[:total], by_row.order) and torch.equal(found.by_row.starts, by_row.starts)


def test_order_of_no_tokens():
    found = triton_assign.assign(torch.empty(0, 2, dtype=torch.int64), 0, 3)
    assert found.ends.tolist() == found.counts.tolist() == [0, 0, 0] and len(found.by_row.starts) == 0


def test_scores_that_are_not_finite():
    """Experts are distinct and in range."""
    rule, logits = RouterSpec(16, 8, 3, "softmax", True), random(5, 8)
    logits[2, 3], logits[3], logits[4, 5] = float("nan"), float("nan"), float("-inf")
    found = triton_routing.route(logits, None, rule, None).chosen
    assert found.min() >= 0 and found.max() < 8 and all(len(set(row)) == 3 for row in found.tolist())
    assert found[4].tolist() == routing.route(logits, None, rule, None).chosen[4].tolist()


class TestChoice:
    """On a CPU, as on CUDA."""

    @pytest.fixture(autouse=True)
    def interpreted(self, monkeypatch):
        monkeypatch.setattr(fused, "missing", lambda device: None)

    def choose(self, dtype=torch.float32, **fields):
        config = ModelConfig(**{"num_experts": 4, "hidden_size": 16, "ffn_hidden_size": 24, "swiglu": True, **fields})
        return choose_experts.choose_experts(config, CPU, dtype, weight_grad.fused)

    @pytest.fixture
    def in_fp32(self, monkeypatch):
        """The interpreter has no products of half precision."""
        monkeypatch.setattr(choose_experts, "_no_weight_grad", lambda config, dtype: None)

    def test_the_kernels_are_tried_and_taken(self, in_fp32):
        chosen, choice = self.choose()
        assert choice == "weight gradients, weighted activation, router, order, rows ()"
        assert chosen == choose_experts.load()

    def test_a_wrong_kernel_is_left_out(self, in_fp32, monkeypatch):
        def without_the_last(main_grad, grads, values, assignments, overwrite):
            expert_weight_grad.write_weight_grads(main_grad, grads, values, assignments, overwrite)
            main_grad[-1].zero_()

        found = choose_experts.load()._replace(weight_grad=without_the_last)
        monkeypatch.setattr(choose_experts, "load", lambda: found)
        chosen, choice = self.choose()
        assert choice == "weighted activation, router, order, rows (weight gradients not: its results are wrong)"
        assert chosen.weight_grad is not without_the_last

    def test_reasons(self):
        assert "weight gradients not: GPUs multiply fp32 faster in torch" in self.choose()[1]
        found = self.choose(torch.bfloat16, gradient_accumulation_fusion=False)[1]
        assert "weight gradients not: --no-gradient-accumulation-fusion" in found
        assert "weighted activation not: it has no gate" in self.choose(swiglu=False)[1]
        assert "weighted activation not: --no-bias-swiglu-fusion" in self.choose(bias_swiglu_fusion=False)[1]
        groups = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_score_function": "sigmoid"}
        assert "router not: experts have groups" in self.choose(**groups)[1]
        assert "router not: --moe-router-dtype is fp64" in self.choose(moe_router_dtype="fp64")[1]
        assert self.choose(num_experts=None)[1] == "none (the model has no experts)"
