"""Trials in child processes on a GPU that this process uses, too."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.kernels.backends import flash3
from megatron.kernels.child_answer import read
from megatron.kernels.child_trial import failure_in_child
from megatron.kernels.choose_attention import Needs, try_flash_3
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.kernels import child_trials

pytestmark = NEEDS_CUDA


def test_a_product(tmp_path):
    """The child computes on the device, and its answer depends on the driver's library."""
    assert failure_in_child(partial(child_trials.multiplies), CUDA, "torch", folder=tmp_path) is None
    (path,) = tmp_path.glob("*.json")
    assert any(Path(name).name.startswith("libcuda.so") for name in read(path).files)


@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="FlashAttention-3 is not installed")
@pytest.mark.parametrize("blocks", [False, True])
def test_flash_attention_3(tmp_path, blocks):
    """Whatever it does, this process goes on. On a GPU that it is not built for it cannot work."""
    needs = Needs(torch.device("cuda"), torch.bfloat16, 64, 64, 4, True, 0.0, None, not blocks)
    failure = failure_in_child(partial(try_flash_3, needs, blocks=blocks), CUDA, flash3.MODULE, folder=tmp_path)
    assert (failure is None) == (torch.cuda.get_device_capability(CUDA) == (9, 0)), failure
