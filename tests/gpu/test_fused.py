"""The Triton kernels on a GPU, in half precision, against plain torch; tests/unit/kernels/triton has their logic in
fp32."""

import importlib.util

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.rules.adamw import AdamW
from megatron.core.optimizer.update_rule import Inputs, gate_of
from megatron.kernels import fused
from megatron.kernels.ops import norm, rope
from megatron.kernels.ops.norm import own
from megatron.kernels.ops.update_run import UpdateRun
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.kernels.close import random
from tests.unit.models.builds import GPT, LLAMA

WITHOUT_TRITON = importlib.util.find_spec("triton") is None
pytestmark = [*NEEDS_CUDA, pytest.mark.skipif(WITHOUT_TRITON, reason="Triton is not installed")]
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = 2e-2  # of the largest element; sums in another order round to the other neighbour in half precision


def draw(*shape, dtype, seed=0):
    return random(*shape, dtype=dtype, seed=seed).to(CUDA)


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert float((a.float() - b.float()).abs().max()) <= ROUNDING * float(b.float().abs().max())


def assert_a_step_apart(found, expected):
    """By no more than a step of the dtype for numbers of the size of the terms, which are near one."""
    step = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=4 * step)


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", HALVES)
def test_all_kernels_of_a_model_are_taken(fields, dtype):
    _, choice = fused.choose_fused(ModelConfig(**fields), CUDA, dtype, OptimizerConfig())
    for expected in ("not: the model has none", "not: there is one"):  # of blocks
        choice = choice.replace(expected, "")
    assert "not: " not in choice, choice


@pytest.mark.parametrize("width", [128, 4096, 5000, 16384])
@pytest.mark.parametrize("dtype", HALVES)
def test_norms(width, dtype):
    x, grad = draw(700, width, dtype=dtype), draw(700, width, dtype=dtype, seed=1)
    weight, bias = draw(width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=3)
    results = []
    for kernel in (fused.load().norm, fused.SEPARATE.norm):
        out, rstd = kernel.compute_rms_norm(x, weight, 1e-5, own)
        centered, statistics = kernel.compute_layer_norm(x, weight, bias, 1e-5)
        results.append(
            (
                *(out, centered),
                *kernel.gradient_rms_norm(grad, x, weight, rstd, own),
                *kernel.gradient_layer_norm(grad, x, weight, bias, statistics),
            )
        )
    assert_near(*results)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype", HALVES)
def test_gated_activations(name, dtype):
    x, grad = draw(300, 2 * 1376, dtype=dtype), draw(300, 1376, dtype=dtype, seed=1)
    kernels = (fused.load().activations[name], fused.SEPARATE.activations[name])
    assert_near(*((each.compute(x)[0], each.gradient_of_input(grad, x)) for each in kernels))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_rotation(interleaved, dtype):
    """A GPU adds the second product before it is rounded, here or in torch: by one step of the dtype."""
    keys, angles = draw(64, 2, 3, 6, 128, dtype=dtype)[:, :, :, -2], draw(64, 1, 1, 64, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found, expected = (each.rotate_once(keys, cos, sin, interleaved) for each in (fused.load(), fused.SEPARATE))
    assert_a_step_apart(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_split_of_queries_keys_and_values(interleaved, dtype):
    qkv, angles = draw(64, 2, 3, 6, 128, dtype=dtype), draw(64, 1, 1, 64, dtype=torch.float32, seed=1)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    kernels = fused.load().split, rope.SplitRotation(rope.split, rope.join)
    results = []
    for kernel in kernels:
        three = kernel.split(qkv, *tables, interleaved)
        results.append((*three, kernel.join(*three, *tables, interleaved)))
    for found, expected in zip(*results, strict=True):
        assert_a_step_apart(found, expected)


@pytest.mark.parametrize("width", [128, 4096])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_sums(width, biased, dtype):
    x, branch, grad, beside = (draw(700, width, dtype=dtype, seed=seed) for seed in range(4))
    weight, bias = draw(width, dtype=dtype, seed=5), draw(width, dtype=dtype, seed=6) if biased else None
    results = []
    for kernel in (fused.load().norm.residual, norm.ResidualNorm(norm.compute_add_norm, norm.gradient_add_norm)):
        total, out, statistics = kernel.compute_add_norm(x, branch, weight, bias, 1e-5)
        of_parameters = kernel.gradient_add_norm(grad, beside, total, weight, bias, statistics)
        results.append((total, out, *(each for each in of_parameters if each is not None)))
    assert_near(*results)


@pytest.mark.parametrize("dtype", HALVES)
def test_cross_entropy(dtype):
    logits, targets = draw(200, 40000, dtype=dtype), torch.arange(200, device=CUDA) * 190
    grad = draw(200, dtype=torch.float32, seed=1)
    results = []
    for kernel in (fused.load().cross_entropy, fused.SEPARATE.cross_entropy):
        statistics = kernel.local_statistics(logits, targets, 0)
        log_sum_exp = statistics[1].log() + statistics[0]
        results.append((statistics, kernel.gradient_(logits.clone(), targets, 0, log_sum_exp, grad, 30.0)))
    assert_near(*results)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [1 << 20, 100_001])
@pytest.mark.parametrize("found_inf", [False, True])
def test_adamw(dtype, size, found_inf):
    """Against torch's kernels, with runs of two kinds."""
    runs = [UpdateRun(0, 4160, True, False), UpdateRun(4160, size, False, True)]
    gate = gate_of(torch.tensor(3.7, dtype=torch.float64, device=CUDA), torch.tensor(found_inf, device=CUDA))
    results = []
    for one_pass in (fused.load().make_adamw(runs, CUDA), None):
        names = ("master", "exp_avg", "exp_avg_sq")
        values = {name: draw(size, dtype=torch.float32, seed=seed).abs() for seed, name in enumerate(names)}
        out = torch.empty(size, dtype=dtype, device=CUDA)
        gradient = draw(size, dtype=torch.float32, seed=3)
        AdamW(OptimizerConfig(), runs, one_pass).step(values, gradient, out, Inputs(3, 0.1, 0.2, 0.1, gate))
        results.append((*values.values(), out))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5 if found.dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("size", [1, 1000, 1 << 24])
def test_squares_of_the_norm(size):
    x = draw(size, dtype=torch.float32)
    assert fused.load().square_sum(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("width", [128, 4096, 5000])
@pytest.mark.parametrize("rows", [1, 7, 1000, 32000])
def test_embedding_gradient(rows, width):
    """8192 ids, of which some occur once and half are the same one; twice, to the same bits."""
    ids = (random(8192).abs() * rows).long().clamp(max=rows - 1).to(CUDA)
    ids[::2] = rows // 2
    grad = draw(8192, width, dtype=torch.bfloat16)
    expected = torch.zeros(rows, width, dtype=torch.float64, device=CUDA).index_add_(0, ids, grad.double())
    results = []
    for _ in range(2):
        results.append(torch.zeros(rows, width, device=CUDA))
        fused.load().add_rows(results[-1], ids, grad)
    assert results[0].equal(results[1])
    assert float((results[0] - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
