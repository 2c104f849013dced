"""Weight gradients: the fused kernel against the reference, and what `choose` picks."""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.kernels.choose import choose_kernels
from megatron.kernels.choose_attention import fused_on_cpu
from megatron.kernels.ops import attention, gemm, weight_grad
from tests.unit.kernels.close import random

CPU = torch.device("cpu")
KERNELS = {"fused": weight_grad.fused, "separate": weight_grad.separate}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
class TestKernels:
    def test_overwrites(self, kernel):
        """Whatever was there: a fresh slot is not cleared."""
        grad, x = random(40, 6), random(40, 5, seed=1)
        main_grad = torch.full((6, 5), float("nan"))
        kernel(main_grad, grad, x, True)
        torch.testing.assert_close(main_grad, torch.einsum("no,ni->oi", grad, x))

    def test_accumulates(self, kernel):
        grad, x, main_grad = random(40, 6), random(40, 5, seed=1), random(6, 5, seed=2)
        before = main_grad.clone()
        kernel(main_grad, grad, x, False)
        torch.testing.assert_close(main_grad, before + torch.einsum("no,ni->oi", grad, x))

    def test_writes_into_a_slice_of_a_buffer(self, kernel):
        buffer = torch.full((100,), 7.0)
        kernel(buffer[64:94].view(6, 5), random(40, 6), random(40, 5, seed=1), True)
        assert buffer[:64].eq(7).all() and buffer[94:].eq(7).all()
        torch.testing.assert_close(buffer[64:94].view(6, 5), random(40, 6).t() @ random(40, 5, seed=1))

    def test_any_strides(self, kernel):
        grad, x = random(6, 40).t(), random(5, 40, seed=1).t()
        main_grad = torch.empty(6, 5)
        kernel(main_grad, grad, x, True)
        torch.testing.assert_close(main_grad, torch.einsum("no,ni->oi", grad, x))


def test_separate_rounds_to_the_activation_dtype_first():
    grad, x = random(40, 6, dtype=torch.bfloat16), random(40, 5, dtype=torch.bfloat16, seed=1)
    main_grad = torch.ones(6, 5)
    weight_grad.separate(main_grad, grad, x, False)
    assert main_grad.equal(1.0 + (grad.t() @ x).float())


def test_upcast_does_not_round():
    """bf16 operands, but the gradient is never bf16."""
    grad, x = random(40, 6, dtype=torch.bfloat16), random(40, 5, dtype=torch.bfloat16, seed=1)
    expected = (grad.double().t() @ x.double()).float()
    main_grad = torch.full((6, 5), float("nan"))
    weight_grad.fused_upcast(main_grad, grad, x, True)
    torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=1e-6)
    weight_grad.fused_upcast(main_grad, grad, x, False)
    torch.testing.assert_close(main_grad, 2 * expected, rtol=1e-5, atol=1e-6)
    assert not main_grad.equal(main_grad.bfloat16().float())


@pytest.fixture
def slow_fp16(monkeypatch):
    """A CPU with bf16 instructions and none for fp16, whatever this one has."""
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.float16})


@pytest.mark.parametrize(
    ("fusion", "dtype", "kernel", "why"),
    [
        (True, torch.float32, weight_grad.fused, None),
        (True, torch.bfloat16, weight_grad.separate, "torch has no bfloat16 GEMM with fp32 output on cpu"),
        (True, torch.float16, weight_grad.fused_upcast, None),
        (False, torch.float32, weight_grad.separate, "turned off by --no-gradient-accumulation-fusion"),
        (False, torch.float16, weight_grad.separate, "turned off by --no-gradient-accumulation-fusion"),
    ],
)
def test_choose(fusion, dtype, kernel, why, slow_fp16):
    assert weight_grad.choose(fusion, CPU, dtype) == (kernel, why)


class TestMixedOnCuda:
    """GEMMs with another output dtype, which torch has on CUDA only, are stood in for."""

    CUDA = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        """Tensors for CUDA are made on the CPU; `mm` and `addmm` compute in fp32."""

        def on_cpu(make):
            return lambda *shape, device, **options: make(*shape, **options)

        def mm(a, b, *, out_dtype, out):
            return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

        def addmm(c, a, b, *, out_dtype, out):
            return out.copy_(c + a.to(out_dtype) @ b.to(out_dtype))

        for name, function in (
            ("ones", on_cpu(torch.ones)), ("zeros", on_cpu(torch.zeros)), ("mm", mm), ("addmm", addmm)
        ):  # fmt: skip
            monkeypatch.setattr(torch, name, function)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_where_it_runs(self, dtype):
        assert weight_grad.choose(True, self.CUDA, dtype) == (weight_grad.fused_mixed, None)

    def test_fp32_needs_no_trial(self, monkeypatch):
        monkeypatch.setattr(weight_grad, "failure_of_mixed", None)
        assert weight_grad.choose(True, self.CUDA, torch.float32) == (weight_grad.fused, None)

    def test_a_torch_that_writes_and_does_not_add(self, monkeypatch):
        """So the first microbatch would pass, and the second would end the run."""

        def addmm(c, a, b, *, out_dtype, out):
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16\n(at Blas.cpp)")

        monkeypatch.setattr(torch, "addmm", addmm)
        kernel, why = weight_grad.choose(True, self.CUDA, torch.bfloat16)
        assert kernel is weight_grad.separate
        assert why == (
            f"torch {torch.__version__} cannot add a product to an fp32 gradient here: "
            "self and mat2 must have the same dtype, but got Float and BFloat16"
        )

    def test_a_sum_that_is_lost(self, monkeypatch):
        def addmm(c, a, b, *, out_dtype, out):
            return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

        monkeypatch.setattr(torch, "addmm", addmm)
        kernel, why = weight_grad.choose(True, self.CUDA, torch.float16)
        assert kernel is weight_grad.separate and "wrongly" in why


def test_choose_kernels_of_a_run(slow_fp16):
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    kernels = choose_kernels(ModelConfig(**sizes, bf16=True, attention_backend="unfused"), CPU)
    assert kernels.attention is attention.unfused and kernels.weight_grad is weight_grad.separate
    assert kernels.attention_choice.startswith("unfused") and "bfloat16" in (kernels.fusion_missing or "")
    kernels = choose_kernels(ModelConfig(**sizes, attention_dropout=0.0), CPU)
    assert kernels.attention is fused_on_cpu and kernels.weight_grad is weight_grad.fused
    assert kernels.fusion_missing is None
