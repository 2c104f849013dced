"""Kernels in Triton during a dry run: any machine loads them, they allocate their results, and launch nothing."""

import sys

import torch

from megatron.kernels import fused
from megatron.kernels.choose_quantize import load as load_quantize
from megatron.kernels.ops import norm
from megatron.kernels.simulated_triton import simulated_triton

PACKAGE = "megatron.kernels.backends.triton"


def of_triton():
    """The modules of Triton and of the kernels in it that are imported now."""
    return {name: module for name, module in sys.modules.items() if name.startswith(("triton", PACKAGE))}


def test_a_kernel_allocates_its_result_and_launches_nothing():
    x, weight = torch.randn(5, 48), torch.ones(48)
    with simulated_triton((9, 0)):
        out, rstd = fused.load().norm.compute_rms_norm(x, weight, 1e-5, norm.own)
    assert out.shape == x.shape and out.dtype == x.dtype and rstd.shape == (5, 1)


def test_kernels_know_the_capability():
    for capability, has in (((9, 0), True), ((8, 0), False)):
        with simulated_triton(capability):
            load_quantize()
            assert sys.modules[f"{PACKAGE}.quantize"].has_instruction() is has


def test_behind_it_modules_are_those_of_before():
    before = of_triton()
    with simulated_triton((9, 0)):
        assert f"{PACKAGE}.norm" in sys.modules and "triton" not in of_triton().keys() - before.keys()
    assert of_triton() == before
