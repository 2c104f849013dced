"""The experts of a rank against their definition, row by row, in fp64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron.core.parameter import GradSlot
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.core.transformer.moe.experts import Experts
from megatron.kernels.ops import gemm
from megatron.kernels.ops.grouped_gemm import grouped, loop
from megatron.spec.moe import ExpertsSpec
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices, dense, stacks
from tests.unit.models.builds import LLAMA, make_build
from tests.unit.silent_groups import silent_groups

ROWS, E, H, WIDTH = 13, 6, 16, 24
KERNELS = {"loop": loop, "grouped": grouped}
CASES = ["uniform", "skew", "all", "ragged", "none"]


def swiglu(inner):
    return F.silu(inner[0]) * inner[1]


ACTIVATIONS = {"swiglu": swiglu, "gelu": F.gelu, "squared_relu": lambda inner: F.relu(inner).square()}


def make_experts(activation="swiglu", *, kernel=KERNELS["loop"], dtype=torch.float32, groups=None, **options):
    """Experts with random weights, which no bucket owns."""
    build = make_build({**LLAMA, "bf16": dtype == torch.bfloat16}, groups or silent_groups(1, 0))
    build = dataclasses.replace(build, kernels=dataclasses.replace(build.kernels, grouped=kernel))
    gated = activation == "swiglu"
    experts = Experts(build, ExpertsSpec(H, E, WIDTH, activation, gated), **options)
    if groups is None:
        for parameter, value in zip(experts.parameters(), stacks(E, H, WIDTH, gated=gated, dtype=dtype), strict=True):
            parameter.data.copy_(value)
    return experts


def inputs(case, dtype=torch.float32):
    """(rows, weights, assignments); the first two are leaves."""
    assignments = assign(choices(case, ROWS, E), E)
    weights = random(len(assignments.rows), seed=2).abs()
    return random(ROWS, H, dtype=dtype).requires_grad_(), weights.requires_grad_(), assignments


UPSTREAM = random(ROWS, H, seed=9)


def run(experts, case, dtype=torch.float32):
    """[output, gradients of rows, weights, and of the parameters that have one]."""
    rows, weights, assignments = inputs(case, dtype)
    out = experts(rows, weights, assignments)
    out.backward(UPSTREAM.to(dtype))
    return [out.detach(), rows.grad, weights.grad, *(p.grad for p in experts.parameters() if p.grad is not None)]


def expected(experts, activation, case, dtype=torch.float32):
    rows, weights, assignments = inputs(case, dtype)
    leaves = [t.detach().double().requires_grad_() for t in (rows, weights, *experts.parameters())]
    out = dense(*leaves, assignments, ACTIVATIONS[activation])
    grads = torch.autograd.grad(out, leaves, UPSTREAM.to(dtype).double(), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def assert_close(found, exact, dtype):
    """Relative to the largest element. bf16 rounds inputs of every product."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(found, exact, strict=True):
        scale = float(b.abs().max()) if b.numel() and b.any() else 1.0
        torch.testing.assert_close(a.double() / scale, b / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("case", CASES)
class TestParity:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_fp32(self, activation, case, kernel):
        experts = make_experts(activation, kernel=kernel)
        assert_close(run(experts, case), expected(experts, activation, case), torch.float32)

    @pytest.mark.parametrize("slow", [True, False], ids=["upcast", "native"])
    def test_bf16(self, case, kernel, slow, monkeypatch):
        monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16} if slow else set())
        experts = make_experts(kernel=kernel, dtype=torch.bfloat16)
        found = run(experts, case, torch.bfloat16)
        assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] + [torch.bfloat16] * 2
        assert_close(found, expected(experts, "swiglu", case, torch.bfloat16), torch.bfloat16)

    def test_recomputed_activation_has_the_same_bits(self, case, kernel):
        for dtype in (torch.float32, torch.bfloat16):
            kept = run(make_experts(kernel=kernel, dtype=dtype), case, dtype)
            recomputed = run(make_experts(kernel=kernel, dtype=dtype, recompute_activation=True), case, dtype)
            assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_no_rows():
    """A rank to which nobody sends a row delivers zeros."""
    experts = make_experts()
    rows = torch.empty(0, H, requires_grad=True)
    out = experts(rows, torch.empty(0, requires_grad=True), assign([], E))
    out.backward(torch.empty(0, H))
    assert out.shape == rows.grad.shape == (0, H)
    assert all(parameter.grad.eq(0).all() for parameter in experts.parameters())


class TestSlots:
    """Gradients in the fp32 memory of a bucket."""

    def with_slots(self, experts):
        for parameter in experts.parameters():
            parameter.slot = GradSlot(lambda: None)
            parameter.slot.main_grad = torch.full(parameter.shape, float("nan"))
        return [parameter.slot for parameter in experts.parameters()]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("case", CASES)
    def test_written_then_added(self, case, dtype):
        """Nothing is cleared before; experts without rows are written, too."""
        experts = make_experts(dtype=dtype)
        exact = expected(experts, "swiglu", case, dtype)[3:]
        slots = self.with_slots(experts)
        for microbatches in (1, 2):
            assert len(run(experts, case, dtype)) == 3, "no gradient goes to autograd"
            assert_close([slot.main_grad for slot in slots], [microbatches * grad for grad in exact], dtype)

    @pytest.mark.parametrize("recompute_activation", [True, False])
    def test_deferred(self, recompute_activation):
        """Jobs that run after two backwards, as a split backward has them, give the bits of jobs that run at once."""
        at_once, later = (make_experts(recompute_activation=recompute_activation) for _ in range(2))
        now, deferred, jobs = self.with_slots(at_once), self.with_slots(later), []
        for slot in deferred:
            slot.deferred = jobs
        for case in ("ragged", "uniform"):
            first, second = run(at_once, case), run(later, case)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert len(jobs) == 4 and all(slot.main_grad.isnan().all() for slot in deferred)
        for job in jobs:
            job()
        assert all(torch.equal(a.main_grad, b.main_grad) for a, b in zip(now, deferred, strict=True))


class TestBiases:
    """b1 before the activation, and b2 times the weight of the assignment."""

    @pytest.fixture
    def experts(self):
        build = make_build(LLAMA, silent_groups(1, 0))
        experts = Experts(build, ExpertsSpec(H, E, WIDTH, "swiglu", gated=True, has_bias=True))
        for number, parameter in enumerate(experts.parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=20 + number, scale=0.3))
        return experts

    def exact(self, experts, case):
        rows, weights, assignments = inputs(case)
        matrices, biases = (experts.linear_fc1, experts.linear_fc2), ("linear_fc1.bias", "linear_fc2.bias")
        named = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
        rows, weights = (x.detach().double().requires_grad_() for x in (rows, weights))
        fc1, fc2 = named["linear_fc1.weight"], named["linear_fc2.weight"]
        assert all(matrix.bias is not None for matrix in matrices)
        out = dense(rows, weights, fc1, fc2, assignments, swiglu, [named[name] for name in biases])
        leaves = [rows, weights, *named.values()]
        grads = torch.autograd.grad(out, leaves, UPSTREAM.double(), allow_unused=True)
        return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]

    @pytest.mark.parametrize("case", CASES)
    def test_gradients(self, experts, case):
        assert_close(run(experts, case), self.exact(experts, case), torch.float32)

    def test_frozen_matrices(self, experts):
        exact = self.exact(experts, "ragged")
        for matrix in (experts.linear_fc1, experts.linear_fc2):
            matrix.weight.requires_grad_(False)
        assert_close(run(experts, "ragged"), [*exact[:3], exact[4], exact[6]], torch.float32)

    def test_written_then_added(self, experts):
        exact = self.exact(experts, "uniform")[3:]
        slots = TestSlots().with_slots(experts)
        for microbatches in (1, 2):
            run(experts, "uniform")
            assert_close([slot.main_grad for slot in slots], [microbatches * grad for grad in exact], torch.float32)


class TestFrozen:
    @pytest.mark.parametrize("frozen", ["linear_fc1", "linear_fc2"])
    def test_gradients_of_the_rest(self, frozen):
        experts = make_experts()
        exact = expected(experts, "swiglu", "ragged")
        getattr(experts, frozen).weight.requires_grad_(False)
        del exact[3 if frozen == "linear_fc1" else 4]
        assert_close(run(experts, "ragged"), exact, torch.float32)

    def test_rows_that_need_no_gradient(self):
        """As in the first layer under adapters: the weights still get theirs."""
        experts = make_experts()
        exact = expected(experts, "swiglu", "ragged")
        experts.requires_grad_(False)
        rows, weights, assignments = inputs("ragged")
        experts(rows.detach(), weights, assignments).backward(UPSTREAM)
        assert_close([weights.grad], [exact[2]], torch.float32)

    @pytest.mark.parametrize("recompute_activation", [True, False])
    @pytest.mark.parametrize("frozen", [True, False])
    def test_saved_bytes(self, recompute_activation, frozen):
        """The rows unless fc1 is frozen, their order, weights, fc1's output, and the activation if it is kept."""
        experts = make_experts(recompute_activation=recompute_activation)
        experts.linear_fc1.weight.requires_grad_(not frozen)
        rows, weights, assignments = inputs("uniform")
        assigned = len(assignments.rows)
        elements = assigned * (1 + 2 * WIDTH + (0 if recompute_activation else WIDTH)) + (0 if frozen else ROWS * H)
        assert saved_bytes(lambda: experts(rows, weights, assignments)) == 4 * elements + 8 * (assigned + ROWS)


class TestWithoutGemm:
    """The second run of a recomputed region that ends with the experts."""

    @pytest.mark.parametrize("recompute_activation", [True, False])
    def test_saves_the_same(self, recompute_activation):
        experts = make_experts(recompute_activation=recompute_activation)
        runs = []
        for skip in (False, True):
            saved = []
            rows, weights, assignments = inputs("ragged")
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                if skip:
                    with experts.without_gemm():
                        out = experts(rows, weights, assignments)
                else:
                    out = experts(rows, weights, assignments)
            out.backward(UPSTREAM)
            runs.append([*saved, rows.grad, weights.grad, *(p.grad for p in experts.parameters())])
            experts.zero_grad(set_to_none=True)
        assert len(runs[0]) == (9 if recompute_activation else 10)
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    def test_leaves_out_the_product(self):
        def without_fc2(values, matrices, assignments):
            assert matrices.shape[1] == H, "fc2 ran"
            return loop(values, matrices, assignments)

        experts = make_experts(kernel=without_fc2)
        with pytest.raises(AssertionError, match="fc2 ran"):
            experts(*inputs("ragged"))
        with experts.without_gemm():
            assert experts(*inputs("ragged")).shape == (ROWS, H)


def test_parameters_of_a_rank():
    experts = make_experts(groups=silent_groups(4, 0, etp=2, ep=2))
    shapes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
    assert shapes == {"linear_fc1.weight": (3, 2, 12, H), "linear_fc2.weight": (3, H, 12)}
