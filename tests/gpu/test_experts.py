"""Experts on CUDA: torch's grouped product and the loop, against the loop on the CPU in fp64."""

import importlib.util

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.kernels import choose_experts
from megatron.kernels.ops import activation, grouped_gemm, grouped_mlp, routing, weight_grad
from megatron.kernels.ops import assignments as assignments_ops
from megatron.kernels.ops.assignments import Assignments, Picked, row_order
from megatron.kernels.ops.expert_weight_grad import one_by_one
from megatron.kernels.ops.grouped_gemm import grouped, loop
from megatron.kernels.ops.grouped_linear import PlainGrouped
from megatron.kernels.ops.grouped_mlp import ExpertKernels
from megatron.kernels.ops.weighted_activation import Separate
from megatron.spec.moe import RouterSpec
from tests.gpu.cuda import CPU, CUDA, NEEDS_CUDA
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices, stacks

pytestmark = NEEDS_CUDA
ROWS, E, H, WIDTH = 200, 8, 64, 48


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ONE_BY_ONE = one_by_one(weight_grad.separate)


def run(kernel, device, dtype, case, kernel_of_weights=ONE_BY_ONE):
    """[output, gradients of rows, weights, fc1, fc2], with gradients of the parameters in memory that was not
    cleared."""
    rows, weights, sizes = assign_on(device, case)
    assignments = Assignments(rows, torch.tensor(sizes, device=device).cumsum(0).int(), sizes)
    fc1, fc2 = (w.bfloat16().to(device, dtype) for w in stacks(E, H, WIDTH, gated=True))
    x, grad = (random(ROWS, H, seed=seed).bfloat16().to(device, dtype) for seed in (0, 1))
    plain = PlainGrouped(kernel)
    kernels = ExpertKernels(plain, plain, kernel_of_weights, Separate(activation.swiglu), assignments_ops.SEPARATE)
    main_dtype = torch.promote_types(dtype, torch.float32)
    main_grads = [torch.full(w.shape, float("nan"), device=device, dtype=main_dtype) for w in (fc1, fc2)]
    out, saved = grouped_mlp.forward(x, weights, assignments, fc1, fc2, kernels, keep_activation=False, skip_fc2=False)
    grads = grouped_mlp.backward(
        grad,
        saved,
        assignments,
        fc1,
        fc2,
        kernels,
        deliver_fc1=lambda write: write(main_grads[0], True),
        deliver_fc2=lambda write: write(main_grads[1], True),
        wants_rows=True,
    )
    return [out, *grads, *main_grads]


def assign_on(device, case):
    given = assign(choices(case, ROWS, E), E)
    return given.rows.to(device), random(len(given.rows), seed=2).abs().to(device), given.sizes


@pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged", "none"])
@pytest.mark.parametrize("kernel", [loop, grouped], ids=["loop", "grouped"])
def test_bf16(kernel, case):
    kind, _ = weight_grad.choose(True, CUDA, torch.bfloat16)
    found, exact = run(kernel, CUDA, torch.bfloat16, case, one_by_one(kind)), run(loop, CPU, torch.float64, case)
    for a, b in zip(found, exact, strict=True):
        scale = float(b.abs().max()) if b.numel() and b.any() else 1.0
        torch.testing.assert_close(a.double().cpu() / scale, b / scale, rtol=0, atol=2e-2)


@pytest.mark.parametrize("kernel", [loop, grouped], ids=["loop", "grouped"])
def test_two_runs_have_the_same_bits(kernel):
    first, second = (run(kernel, CUDA, torch.bfloat16, "all") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_chosen():
    kernel, why = grouped_gemm.choose(CUDA, torch.bfloat16, (H, WIDTH))
    if torch.cuda.get_device_capability() >= (8, 0) and hasattr(torch.nn.functional, "grouped_mm"):
        assert kernel is grouped and why is None


def assert_near(found, expected, tolerance):
    """Relative to the largest element of each."""
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = float(b.abs().max()) if b.numel() and b.any() else 1.0
        torch.testing.assert_close(a.float() / scale, b.float() / scale, rtol=0, atol=tolerance)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_kernels_of_experts_are_taken(dtype):
    config = ModelConfig(num_experts=E, hidden_size=H, ffn_hidden_size=WIDTH, swiglu=True)
    _, choice = choose_experts.choose_experts(config, CUDA, dtype, weight_grad.fused_mixed)
    assert " not: " not in choice and not choice.startswith("none"), choice


@NEEDS_TRITON
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged", "none"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 2048), (2048, 768), (200, 72)])
def test_weight_gradients_of_all_experts(case, outputs, inputs, overwrite):
    """Products of bf16 numbers, in fp32: only the order of sums differs."""
    rows, _, sizes = assign_on(CUDA, case)
    assignments = Assignments(rows, torch.tensor(sizes, device=CUDA).cumsum(0).int(), sizes)
    of_rows = {width: random(ROWS, width, seed=width).bfloat16().to(CUDA) for width in (outputs, inputs)}
    of_pairs = {width: random(len(rows), width, seed=1).bfloat16().to(CUDA) for width in (outputs, inputs)}
    before = random(E, outputs, inputs, seed=3).to(CUDA)
    for grads, values in (
        (Picked(of_rows[outputs], rows), Picked(of_pairs[inputs], None)),
        (Picked(of_pairs[outputs], None), Picked(of_rows[inputs], rows)),
    ):
        results = []
        for kernel in (choose_experts.load().weight_grad, one_by_one(weight_grad.fused_upcast)):
            results.append(torch.full_like(before, float("nan")) if overwrite else before.clone())
            kernel(results[-1], grads, values, assignments, overwrite)
        assert_near(results[:1], results[1:], 1e-4)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("width", [768, 2816, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weighted_activations(name, width, dtype):
    inner, grad = (random(300, w, dtype=dtype, seed=w).to(CUDA) for w in (2 * width, width))
    weights, results = random(300, seed=2).abs().to(CUDA), []
    for kernel in (choose_experts.load().activations[name], Separate(getattr(activation, name))):
        again = []
        gradients = kernel.gradient(grad.clone(), inner, None, weights, take=again.append, wants_inner=True)
        results.append((kernel.product(inner, None, weights), *again, *gradients))
    assert_near(*results, 2e-2)


@NEEDS_TRITON
@pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged", "none"])
@pytest.mark.parametrize("width", [2048, 5000, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_and_their_sums_have_the_same_bits(case, width, dtype):
    rows, _, sizes = assign_on(CUDA, case)
    by_row = row_order(Assignments(rows, torch.tensor(sizes, device=CUDA).cumsum(0).int(), sizes), ROWS)
    values = random(ROWS, width, dtype=dtype).to(CUDA)
    results = []
    for kernels in (choose_experts.load().rows, assignments_ops.SEPARATE):
        gathered = kernels.gather(values, rows)
        results.append((gathered, kernels.add_up(gathered * 0.7, by_row)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@NEEDS_TRITON
@pytest.mark.parametrize("experts", [128, 60, 512])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_router(experts, score_function, has_bias):
    """Logits that differ clearly, and equal ones: the choice is the same."""
    rule = RouterSpec(16, experts, 8, score_function, True, scaling=2.5)
    logits = (torch.stack([torch.randperm(2 * experts)[:experts] for _ in range(500)]) // 2 * (8 / experts)).to(CUDA)
    bias = (random(experts, seed=1).mul(2).round() / 8).to(CUDA) if has_bias else None
    kernels, terms = choose_experts.load().router, {"prices": random(4, experts, seed=2).to(CUDA)}
    terms |= {"z_weight": torch.tensor(0.7, device=CUDA), "routed": random(500, seed=3).to(CUDA) > 0}
    found, expected = (each.route(logits, bias, rule, None) for each in (kernels, routing.SEPARATE))
    if not has_bias:  # with it, sums that are nearly equal may be ordered otherwise
        assert torch.equal(found.chosen, expected.chosen)
    chosen = expected.chosen.masked_fill(torch.arange(500, device=CUDA)[:, None] % 7 == 0, -1)
    results = []
    for each in (kernels, routing.SEPARATE):
        given = each.route(logits, bias, rule, chosen)
        gradient = each.gradient(logits, chosen, random(500, 8, seed=4).to(CUDA), rule, **terms)
        results.append((given.scores, given.weights, gradient))
    assert_near(*results, 1e-5)


@NEEDS_TRITON
@pytest.mark.parametrize(("experts", "k", "first", "here"), [(128, 8, 0, 128), (60, 4, 15, 15), (512, 10, 0, 512)])
@pytest.mark.parametrize("tokens", [1, 700, 8192])
def test_order(experts, k, first, here, tokens):
    indices = random(tokens, experts).topk(k).indices
    indices = indices.masked_fill(random(tokens, k, seed=1).abs() < 0.1, -1).to(CUDA)
    found, expected = (each(indices, first, here) for each in (choose_experts.load().assign, assignments_ops.assign))
    total = int(expected.ends[-1])
    by_row = row_order(Assignments(expected.rows[:total], expected.ends, []), tokens)
    assert torch.equal(found.ends, expected.ends) and torch.equal(found.counts, expected.counts.int())
    assert torch.equal(found.positions[:total], expected.positions[:total])
    assert torch.equal(found.rows[:total], expected.rows[:total])
    assert torch.equal(found.by_row.order[:total], by_row.order) and torch.equal(found.by_row.starts, by_row.starts)
