"""Which FlashAttention a run takes on a GPU: what the packages and the trial say is given by stand-ins."""

import importlib.util

import pytest
import torch
import torch.nn.attention as torch_attention

from megatron.config.model import ModelConfig
from megatron.kernels import choose
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops import attention_lse, weight_grad

CUDA = torch.device("cuda", 0)
MODEL = {"bf16": True, "hidden_size": 512, "num_attention_heads": 8, "num_layers": 2, "attention_dropout": 0.0}
SECOND = "FlashAttention-2 in torch SDPA"


class Hopper:
    """A GPU, torch, and the package of FlashAttention-3. `broken`: what fails when, (version, way) -> error."""

    def __init__(self, monkeypatch):
        self.version, self.broken, self.tried = 2, {}, []
        self.load_error = None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
        monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", self.activate, raising=False)
        monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", self.restore, raising=False)
        monkeypatch.setattr(weight_grad, "failure_of_mixed", lambda device, dtype: None, raising=False)
        monkeypatch.setattr(choose, "try_attention", self.attend, raising=False)
        monkeypatch.setattr(choose, "try_blocks", self.attend_blocks, raising=False)

    def activate(self, name):
        if self.load_error:
            raise self.load_error
        self.version = int(name.removeprefix("FA"))

    def restore(self, _raise_warn=True):
        self.version = 2

    def attend(self, kernel, device, dtype, *, head, queries, windowed, dropout):
        self.tried.append((self.version, "attention", head, queries, windowed, dropout))
        self.fail("attention")
        if windowed:
            self.fail("window")

    def attend_blocks(self, kernel, device, dtype, *, head, queries, windowed):
        self.tried.append((self.version, "blocks", head, queries, windowed))
        self.fail("blocks")

    def fail(self, way):
        if (self.version, way) in self.broken:
            raise RuntimeError(self.broken[self.version, way])


@pytest.fixture
def hopper(monkeypatch):
    return Hopper(monkeypatch)


def choice(**fields):
    return choose_kernels(ModelConfig(**{**MODEL, **fields}), CUDA).attention_choice


def test_version_3_where_it_runs(hopper):
    assert choice() == "flash (FlashAttention-3 in torch SDPA)" and hopper.version == 3


def test_dropout_takes_version_2(hopper):
    """torch raises "dropout_p must be 0" in the first step otherwise, and 0.1 is the default."""
    assert choice(attention_dropout=0.1) == f"flash ({SECOND}; FlashAttention-3 has no dropout)"
    assert hopper.version == 2
    assert choice() == "flash (FlashAttention-3 in torch SDPA)"
    assert choice(attention_dropout=0.1).startswith(f"flash ({SECOND}") and hopper.version == 2, "also after another"


def test_a_package_that_cannot_be_loaded(hopper):
    hopper.load_error = ImportError("flash_attn_interface.so: undefined symbol: _ZN3c10\nmore")
    assert choice() == (
        f"flash ({SECOND}; FlashAttention-3 cannot be loaded: flash_attn_interface.so: undefined symbol: _ZN3c10)"
    )


def test_a_build_without_gradient(hopper):
    hopper.broken[3, "attention"] = "FA3 flash_attention backward unsupported: fp8 only"
    assert choice() == (
        f"flash ({SECOND}; FlashAttention-3 failed: FA3 flash_attention backward unsupported: fp8 only)"
    )
    assert hopper.version == 2


def test_a_build_without_windows(hopper):
    """It serves a model without windows, and no other."""
    hopper.broken[3, "window"] = "This flash attention build does not support local attention."
    assert choice() == "flash (FlashAttention-3 in torch SDPA)"
    assert choice(window_size="63,0").startswith(f"flash ({SECOND}; FlashAttention-3 failed: This flash attention")


def test_blocks_are_tried_under_context_parallelism(hopper):
    hopper.broken[3, "blocks"] = "no local attention"
    assert choose_kernels(ModelConfig(**MODEL), CUDA).block_choice == "flash blocks (FlashAttention-3 in torch SDPA)"
    kernels = choose_kernels(ModelConfig(**MODEL), CUDA, blocks=True)
    assert kernels.block_choice == f"flash blocks ({SECOND}; FlashAttention-3 failed: no local attention)"
    assert kernels.attention_choice.startswith(f"flash ({SECOND};") and hopper.version == 2


@pytest.mark.parametrize("blocks", [True, False])
def test_no_version_runs(hopper, blocks):
    """As for heads of more than 256 channels: torch raises "No available kernel" in the first step otherwise."""
    hopper.broken = {(version, "attention"): "No available kernel. Aborting execution." for version in (2, 3)}
    kernels = choose_kernels(ModelConfig(**MODEL, kv_channels=320), CUDA, blocks=blocks)
    assert kernels.attention_choice.startswith("fused (") and kernels.block_attention is attention_lse.efficient
    why = "no flash: FlashAttention-2 failed: No available kernel. Aborting execution."
    assert kernels.attention_choice == f"fused (torch SDPA; {why})"
    assert kernels.block_choice == f"memory-efficient blocks ({why})"


def test_the_model_is_what_is_tried(hopper):
    fields = {"group_query_attention": True, "num_query_groups": 2, "window_size": "63,0", "kv_channels": 96}
    choose_kernels(ModelConfig(**MODEL, **fields), CUDA, blocks=True)
    assert hopper.tried == [(3, "attention", 96, 4, True, 0.0), (3, "blocks", 96, 4, True)]


@pytest.mark.parametrize("fields", [{"attention_backend": "fused"}, {"attn_logit_softcapping": 30.0}])
def test_nothing_is_tried_where_it_would_not_be_taken(hopper, fields):
    choice(**fields)
    assert hopper.tried == [] and hopper.version == 2


def test_on_an_older_gpu_nobody_expects_version_3(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    hopper.broken[2, "attention"] = "No available kernel"
    assert choice() == "fused (torch SDPA; no flash: FlashAttention-2 failed: No available kernel)"
    hopper.broken.clear()
    assert choice() == f"flash ({SECOND})"
