"""The choice of fused kernels where there are none; tests/unit/kernels/triton tests it with them."""

import importlib.util

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config.model import ModelConfig
from megatron.kernels import fused
from megatron.kernels.choose import choose_kernels

CPU = torch.device("cpu")


def test_none_on_a_cpu():
    kernels = choose_kernels(ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4), CPU)
    assert (kernels.fused, kernels.fused_choice) == (fused.SEPARATE, "none (the device is cpu)")


def test_none_in_a_dry_run_of_an_older_gpu(monkeypatch):
    """A dry run traces kernels in Triton also where that is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with FakeTensorMode():
        found = fused.choose_fused(ModelConfig(), torch.device("cuda"), torch.bfloat16)
    assert found == (fused.SEPARATE, "none (the GPU is older than Ampere)")


def test_none_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fused.choose_fused(ModelConfig(), torch.device("cuda"), torch.bfloat16)
    assert found == (fused.SEPARATE, "none (Triton is not installed)")
