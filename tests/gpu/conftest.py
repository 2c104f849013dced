"""What the tests on a GPU share."""

import functools
from functools import partial

import pytest
import torch

from megatron.kernels import choose_attention
from megatron.kernels import transformer_engine as chooser
from megatron.kernels.backends import flash3
from megatron.kernels.child_trial import failure_in_child
from megatron.kernels.choose_attention import Needs, try_flash_3
from tests.gpu.cuda import CUDA


@pytest.fixture(autouse=True)
def one_child(monkeypatch):
    """A child process tries FlashAttention-3 once for all tests: one for each of their sizes would take minutes.
    Transformer Engine reports its failures as exceptions."""
    monkeypatch.setattr(choose_attention, "failure_in_child", lambda *_: _failure_of_flash_3())
    monkeypatch.setattr(chooser, "failure_in_child", lambda *_: None)


@functools.cache
def _failure_of_flash_3():
    needs = Needs(torch.device("cuda"), torch.bfloat16, 64, 64, 4, True, 0.0, None, True)
    return failure_in_child(partial(try_flash_3, needs, blocks=False), CUDA, flash3.MODULE)
