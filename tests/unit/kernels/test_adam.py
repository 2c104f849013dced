"""CPU AdamW: torch's kernel in fp32, and the one-pass kernel against its definition in numpy, bit for bit."""

import itertools
import logging
import math
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.kernels.backends import cpu_adam
from megatron.kernels.ops import adam
from tests.unit.kernels.close import random

GRADS = (torch.float32, torch.bfloat16)
OUTS = (None, torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 15, 16, 17, 63, 64, 1000, 4099)
SETTINGS = (
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "divisor": 1.0},
    {"lr": 3e-2, "beta1": 0.3, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0, "divisor": 3.7},
)
needs_kernel = pytest.mark.skipif(cpu_adam.missing() is not None, reason=str(cpu_adam.missing()))
CAN_BUILD = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()


def tensors(size, grad=torch.float32, out=None, *, offset=0, seed=0):
    """param, grad, exp_avg, exp_avg_sq and out, each a slice that starts `offset` elements into its memory."""
    n = size + offset
    whole = [random(n, seed=seed), random(n, seed=seed + 1, scale=0.1), random(n, seed=seed + 2, scale=0.1)]
    whole += [random(n, seed=seed + 3, scale=0.1).square(), torch.full((n,), math.nan)]
    whole[1], whole[4] = whole[1].to(grad), whole[4].to(out or torch.float32)
    parts = [t[offset:] for t in whole]
    return parts if out else [*parts[:4], None]


def run(step, values, number, settings):
    param, grad, exp_avg, exp_avg_sq, out = values
    step(param, grad, exp_avg, exp_avg_sq, step=number, out=out, **settings)


def fma(a, b, c):
    """Exact product, one rounding to fp64 and one to fp32: as good as one but in some 1e-9 of all cases."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def defined(values, step, *, lr, beta1, beta2, eps, weight_decay, divisor):
    """param, exp_avg, exp_avg_sq after the step: every operation in fp32, in the order cpu_adam.cpp promises."""
    p, g, m, v = (t.float().numpy() for t in values[:4])
    f = np.float32
    with np.errstate(invalid="ignore"):
        g = g / f(divisor)
        near = f(1 - beta1) < f(0.5)
        m = fma(f(1 - beta1), g - m, m) if near else fma(f(1 - beta1) - f(1), g - m, g)
        v = fma(f(1 - beta2) * g, g, v * f(beta2))
        rate, correction = f(-lr / (1 - beta1**step)), f(math.sqrt(1 - beta2**step))
        p = p * f(1 - lr * weight_decay) + rate * m / (np.sqrt(v) / correction + f(eps))
    return [torch.from_numpy(x) for x in (p, m, v)]


def assert_bits(found, expected):
    """The same bits, or both not a number."""
    same = (found == expected) & (torch.signbit(found) == torch.signbit(expected)) | (found.isnan() & expected.isnan())
    assert found.dtype == expected.dtype and same.all(), (found[~same][:4], expected[~same][:4])


def assert_defined(values, number, settings):
    """One step of the kernel gives what `defined` does, and `out` the parameters as torch rounds them."""
    expected = defined(values, number, **settings)
    gradient = values[1].clone()
    run(adam.adamw_step, values, number, settings)
    for found, wanted in zip((values[0], *values[2:4]), expected, strict=True):
        assert_bits(found, wanted)
    if values[4] is not None:
        assert_bits(values[4], values[0].to(values[4].dtype))
    assert_bits(values[1], gradient)


@pytest.mark.parametrize("settings", SETTINGS)
def test_fp32_is_torch_adamw(settings):
    """What the optimizer ran before this function: torch's AdamW, fused, gradients divided through `grad_scale`."""
    mine = tensors(1003)
    theirs = [t.clone() for t in mine[:4]]
    optimizer = torch.optim.AdamW(
        [theirs[0]], lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"],
        weight_decay=settings["weight_decay"], fused=True,
    )  # fmt: skip
    optimizer.state[theirs[0]].update(step=torch.zeros(()), exp_avg=theirs[2], exp_avg_sq=theirs[3])
    optimizer.grad_scale = None if settings["divisor"] == 1.0 else torch.tensor(settings["divisor"])
    for number in (1, 2, 3):
        gradient = random(1003, seed=number)
        theirs[0].grad, mine[1] = gradient.clone(), gradient.clone()
        optimizer.step()
        run(adam.adamw_step, mine, number, settings)
        for index in (0, 2, 3):
            assert_bits(mine[index], theirs[index])


@needs_kernel
class TestOnePass:
    @pytest.mark.parametrize(("grad", "out"), [c for c in itertools.product(GRADS, OUTS) if c != (GRADS[0], None)])
    def test_bits(self, grad, out):
        """All sizes around the vectors', at addresses that no vector is aligned to."""
        for size, offset, settings in itertools.product(SIZES, (0, 3), SETTINGS):
            assert_defined(tensors(size, grad, out, offset=offset), 2, settings)

    def test_many_steps(self):
        """Against AdamW's formulas in fp64."""
        values, settings = tensors(999, torch.bfloat16, torch.bfloat16), SETTINGS[0]
        p, m, v = (values[index].double() for index in (0, 2, 3))
        for number in range(1, 21):
            values[1] = random(999, seed=number, dtype=torch.bfloat16)
            g = values[1].double()
            run(adam.adamw_step, values, number, settings)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            denominator = (v / (1 - 0.95**number)).sqrt() + 1e-8
            p = p * (1 - 1e-3 * 0.1) - 1e-3 * m / (1 - 0.9**number) / denominator
        for found, wanted in zip((values[0], *values[2:4]), (p, m, v), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)

    def test_torch_with_conversions_is_the_same(self):
        """But for one fused multiply-add that torch's build may take elsewhere: its kernel for whole vectors of AVX2
        takes those of ours, the loop over the last elements does not."""
        size = 3 * adam.PIECE + 16 * 5
        for grad, out, settings in zip(GRADS[::-1], (torch.bfloat16, torch.float16), SETTINGS, strict=True):
            mine, theirs = tensors(size, grad, out), tensors(size, grad, out)
            run(adam.adamw_step, mine, 5, settings)
            run(adam.separate, theirs, 5, settings)
            for index in (0, 2, 3):
                torch.testing.assert_close(mine[index], theirs[index], rtol=3e-7, atol=2e-8)
                if torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.__version__.startswith("2.13."):
                    assert_bits(mine[index], theirs[index])

    @pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
    def test_rounding(self, out):
        """Every upper half of an fp32 number with lower halves around the ties: as torch rounds; NaN stays NaN."""
        lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
        bits = (torch.arange(-(1 << 15), 1 << 15)[:, None] * (1 << 16) + lower).flatten().int()
        param, rounded, zeros = bits.view(torch.float32), torch.empty(bits.shape, dtype=out), torch.zeros(bits.shape)
        kept = param.clone()
        values = [param, zeros.bfloat16(), zeros, zeros.clone(), rounded]
        run(adam.adamw_step, values, 1, dict(SETTINGS[0], lr=0.0))
        assert_bits(param, kept)
        assert_bits(rounded, kept.to(out))

    def test_not_finite(self):
        values = tensors(64, torch.bfloat16, torch.bfloat16)
        for at, value in enumerate((math.nan, math.inf, -math.inf)):
            values[1][at] = value
        assert_defined(values, 3, SETTINGS[0])
        assert values[0].isnan().nonzero().flatten().tolist() == [0, 1, 2]
        assert values[4].isnan().nonzero().flatten().tolist() == [0, 1, 2]

    @pytest.mark.parametrize("threads", [1, 2, 3, 5])
    def test_threads(self, threads):
        """Each element is updated once, whatever the cut, and nothing around the slice is."""
        size, before = 4 * (1 << 16) + 37, torch.get_num_threads()
        buffers = tensors(size + 2, torch.bfloat16, torch.float16)
        edges = [t[[0, -1]].clone() for t in buffers]
        torch.set_num_threads(threads)
        try:
            assert_defined([t[1:-1] for t in buffers], 4, SETTINGS[1])
        finally:
            torch.set_num_threads(before)
        for buffer, edge in zip(buffers, edges, strict=True):
            assert_bits(buffer[[0, -1]], edge)

    def test_is_what_runs(self, monkeypatch):
        """adamw_step takes the kernel for every mixture, and never converts."""
        monkeypatch.setattr(adam, "separate", None)
        for grad, out in itertools.product(GRADS, OUTS[1:]):
            run(adam.adamw_step, tensors(8, grad, out), 1, SETTINGS[0])


@pytest.mark.skipif(not CAN_BUILD, reason="no g++ or no Python.h")
def test_is_built_where_there_is_a_compiler():
    assert "not built" not in (cpu_adam.missing() or ""), "pip install -e . did not build the extension"


class TestWithoutTheKernel:
    @pytest.fixture(autouse=True)
    def _not_built(self, monkeypatch):
        monkeypatch.setattr(cpu_adam, "_cpu_adam", None)
        adam.without_one_pass.cache_clear()
        yield
        adam.without_one_pass.cache_clear()

    def test_torch_takes_over_and_it_is_logged_once(self, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
        found = []
        for number in (1, 2):
            run(adam.adamw_step, tensors(100, torch.bfloat16, torch.bfloat16), number, SETTINGS[0])
            found.append([record.levelname for record in caplog.records if "CPU Adam" in record.getMessage()])
        # A handler that an earlier test left on the logger shows a record twice.
        assert set(found[0]) == {"WARNING"} and found[1] == found[0]
        assert "not built" in caplog.text

    @pytest.mark.parametrize(("grad", "out"), itertools.product(GRADS, OUTS))
    def test_the_definition_holds(self, grad, out):
        """Up to where torch fuses; over several pieces, and for an empty tensor."""
        for size, settings in itertools.product((0, 50, adam.PIECE + 33), SETTINGS):
            values = tensors(size, grad, out)
            expected = defined(values, 2, **settings)
            run(adam.adamw_step, values, 2, settings)
            for found, wanted in zip((values[0], *values[2:4]), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=3e-7, atol=2e-8)
            if out:
                assert_bits(values[4], values[0].to(out))


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [values[0].double(), *values[1:]],
        lambda values: [values[0], values[1].half(), *values[2:]],
        lambda values: [*values[:3], values[3].bfloat16(), values[4]],
        lambda values: [values[0], values[1][1:], *values[2:]],
        lambda values: [*values[:4], values[4][1:]],
        lambda values: [*values[:4], values[4].double()],
    ],
)
def test_what_does_not_fit_is_refused(change):
    """Before any address is handed over."""
    with pytest.raises(AssertionError):
        run(adam.adamw_step, change(tensors(8, torch.bfloat16, torch.bfloat16)), 1, SETTINGS[0])
