"""Products of linear layers: native, or in fp32 where the CPU has no instructions for half precision."""

import pytest
import torch

from megatron.kernels.ops import gemm
from tests.unit.kernels.close import random

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["native", "upcast"])
def upcast(request, monkeypatch):
    """Both kinds of CPU."""
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", set(HALVES) if request.param else set())
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_linear(upcast, dtype, bias):
    x, weight, b = (random(*shape, dtype=dtype, seed=n) for n, shape in enumerate([(5, 3, 64), (48, 64), (48,)]))
    out = gemm.linear(x, weight, b if bias else None)
    expected = x.double() @ weight.double().t() + (b.double() if bias else 0.0)
    assert out.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 2e-6)  # a sum of 64 products in fp32
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_input_grad(upcast, dtype):
    grad, weight = random(5, 3, 48, dtype=dtype), random(48, 64, dtype=dtype, seed=1)
    out = gemm.input_grad(grad, weight)
    eps = max(torch.finfo(dtype).eps, 2e-6)  # a sum of 64 products in fp32
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), grad.double() @ weight.double(), rtol=eps, atol=8 * eps)


def test_upcast_rounds_once(monkeypatch):
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16})
    x, weight, b = (random(*shape, dtype=torch.bfloat16, seed=n) for n, shape in enumerate([(9, 64), (48, 64), (48,)]))
    assert gemm.linear(x, weight, b).equal((x.float() @ weight.float().t() + b.float()).bfloat16())


def test_who_is_slow(monkeypatch):
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.float16})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert gemm.slow_half(cpu, torch.float16) and not gemm.slow_half(cuda, torch.float16)
    assert not gemm.slow_half(cpu, torch.bfloat16) and not gemm.slow_half(cpu, torch.float32)


def test_fp32_is_never_slow():
    assert set(HALVES) >= gemm._SLOW_ON_CPU
