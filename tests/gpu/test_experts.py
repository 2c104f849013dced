"""Experts on CUDA: torch's grouped product and the loop, against the loop on the CPU in fp64."""

import pytest
import torch

from megatron.kernels.ops import activation, grouped_gemm, grouped_mlp, weight_grad
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.grouped_gemm import grouped, loop
from megatron.kernels.ops.grouped_mlp import ExpertKernels
from tests.gpu.cuda import CPU, CUDA, NEEDS_CUDA
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices, stacks

pytestmark = NEEDS_CUDA
ROWS, E, H, WIDTH = 200, 8, 64, 48


def run(kernel, device, dtype, case, kernel_of_weights=weight_grad.separate):
    """[output, gradients of rows, weights, fc1, fc2], with gradients of the parameters in memory that was not cleared."""
    rows, weights, sizes = assign_on(device, case)
    assignments = Assignments(rows, torch.tensor(sizes, device=device).cumsum(0).int(), sizes)
    fc1, fc2 = (w.bfloat16().to(device, dtype) for w in stacks(E, H, WIDTH, gated=True))
    x, grad = (random(ROWS, H, seed=seed).bfloat16().to(device, dtype) for seed in (0, 1))
    kernels = ExpertKernels(kernel, kernel_of_weights, activation.swiglu)
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
    rows, _, sizes = assign(choices(case, ROWS, E), E)
    return rows.to(device), random(len(rows), seed=2).abs().to(device), sizes


@pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged", "none"])
@pytest.mark.parametrize("kernel", [loop, grouped], ids=["loop", "grouped"])
def test_bf16(kernel, case):
    kind, _ = weight_grad.choose(True, CUDA, torch.bfloat16)
    found, exact = run(kernel, CUDA, torch.bfloat16, case, kind), run(loop, CPU, torch.float64, case)
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
