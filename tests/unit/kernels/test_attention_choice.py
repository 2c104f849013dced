"""Which attention kernel a run takes, and the reasons in the start-up table. What a GPU supports is given by
stand-ins."""

import sys

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels import choose_attention
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops import attention, attention_lse, attention_rows, gemm, weight_grad
from megatron.spec.decoder import attention_core
from tests.unit.kernels.close import random
from tests.unit.kernels.flash3_operator import install

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MODEL = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_layers": 2,
    "attention_dropout": 0.0,
}
THIRD, CUDNN, SECOND, EFFICIENT = "FlashAttention-3", "cuDNN", "FlashAttention-2", "memory-efficient"
NOT_INSTALLED = f"{THIRD}: flash_attn_interface is not installed"
ONE_BY_ONE = f"{CUDNN}: it takes one document at a time"
PLAIN = {"scores": attention.Scores(8**-0.5), "segments": None, "window": None, "dropout": 0.0}


class Gpu:
    """A Hopper with FlashAttention-3. broken: (kernel, "attention" or "blocks" or "window") -> the error of its
    trial."""

    def __init__(self, monkeypatch):
        self.capability, self.broken, self.tried, self.sequences, self.blocks = (9, 0), {}, [], {}, {}
        self.names = {id(each.tried): each.name for asked in ("auto", "flash", "fused") for each in self.known(asked)}
        monkeypatch.setattr(choose_attention, "candidates", lambda asked: self.sequences[asked])
        monkeypatch.setattr(choose_attention, "block_candidates", lambda asked: self.blocks[asked])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: self.capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(weight_grad, "failure_of_mixed", lambda device, dtype: None, raising=False)
        monkeypatch.setattr(choose_attention, "failure_in_child", lambda trial, device, library: None)
        monkeypatch.setattr(choose_attention, "try_attention", self.attend)
        monkeypatch.setattr(choose_attention, "try_blocks", self.attend_blocks)
        install(monkeypatch)

    def known(self, asked):
        self.sequences[asked] = choose_attention.candidates(asked)
        self.blocks[asked] = choose_attention.block_candidates(asked)
        return [*self.sequences[asked], *self.blocks[asked]]

    def attend(self, kernel, device, dtype, **asked):
        name = self.names[id(kernel)]
        self.tried.append((name, "attention", *asked.values()))
        self.fail(name, "attention")
        if asked["windowed"]:
            self.fail(name, "window")

    def attend_blocks(self, kernel, device, dtype, **asked):
        name = self.names[id(kernel)]
        self.tried.append((name, "blocks", *asked.values()))
        self.fail(name, "blocks")

    def fail(self, name, way):
        if (name, way) in self.broken:
            raise self.broken[name, way]


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.fixture
def without_3(gpu, monkeypatch):
    """The same without its package."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    return gpu


def kernels_of(asked="auto", *, documents=False, blocks=False, **fields):
    config = ModelConfig(**{"bf16": not fields.get("fp16"), **MODEL, **fields}, attention_backend=asked)
    return choose_kernels(config, CUDA, blocks=blocks, documents=documents)


def choice(asked="auto", **how):
    return kernels_of(asked, **how).attention_choice


def refusal(asked, **how):
    with pytest.raises(ConfigError) as refused:
        kernels_of(asked, **how)
    message = str(refused.value)
    assert message.endswith("; give --attention-backend auto") and "\n" not in message
    assert message.startswith(f"--attention-backend {asked} cannot run here: ")
    return message.removeprefix(f"--attention-backend {asked} cannot run here: ").removesuffix(
        "; give --attention-backend auto"
    )


class TestOrder:
    def test_each_is_the_next(self, gpu):
        """Each that fails gives the next, and the reasons say why."""
        reasons, expected = [], []
        for name in (THIRD, CUDNN, SECOND, EFFICIENT):
            assert choice() == (f"{name} ({'; '.join(reasons)})" if reasons else name)
            gpu.broken[name, "attention"] = RuntimeError(f"no kernel of {name}\nand more")
            reasons.append(f"{name}: no kernel of {name}")
            expected.append(name)
        assert choice() == f"math ({'; '.join(reasons)})"
        assert kernels_of().attention is attention_rows.attention
        gpu.tried.clear()
        choice()
        assert [name for name, *_ in gpu.tried] == expected, "each is asked once"

    def test_without_flash_attention_3(self, without_3):
        assert choice() == f"{CUDNN} ({NOT_INSTALLED})"
        assert choice(documents=True) == f"{SECOND} ({NOT_INSTALLED}; {ONE_BY_ONE})"

    def test_on_an_older_gpu(self, gpu):
        gpu.capability = (8, 0)
        assert choice() == f"{CUDNN} ({THIRD}: the GPU is sm_80, it needs sm_90)"
        gpu.capability = (7, 5)
        old = "the GPU is older than Ampere"
        assert choice() == (f"{EFFICIENT} ({THIRD}: the GPU is sm_75, it needs sm_90; {CUDNN}: {old}; {SECOND}: {old})")

    def test_fp32(self, gpu):
        wide = "the dtype is float32, it needs bf16 or fp16"
        assert choice(bf16=False) == f"{EFFICIENT} ({THIRD}: {wide}; {CUDNN}: {wide}; {SECOND}: {wide})"

    def test_dropout(self, gpu):
        """torch's own binding of FlashAttention-3 raises in the first step otherwise, and 0.1 is the default."""
        why = f"{THIRD}: it has no dropout, and --attention-dropout is 0.1"
        assert choice(attention_dropout=0.1) == f"{CUDNN} ({why})"
        assert choice("flash", attention_dropout=0.1) == f"{SECOND} ({why})"

    def test_windows(self, gpu):
        """A build without them serves a model without them."""
        gpu.broken[THIRD, "window"] = RuntimeError("This flash attention build does not support local attention.")
        assert choice() == THIRD
        assert choice(window_size="63,0") == (
            f"{SECOND} ({THIRD}: This flash attention build does not support local attention.; "
            f"{CUDNN}: torch's has no --window-size)"
        )

    @pytest.mark.parametrize("head", [20, 200])
    def test_windows_of_unusual_heads(self, without_3, head):
        """torch's operator with windows takes fewer heads than its SDPA without."""
        why = f"{SECOND}: it has no --window-size for heads of {head} channels"
        assert choice(window_size="63,0", kv_channels=head).startswith(f"{EFFICIENT} (")
        assert choice(window_size="63,0", kv_channels=head).endswith(f"{why})")
        assert refusal("flash", window_size="63,0", kv_channels=head).endswith(why)
        assert choice("flash", kv_channels=head).startswith(SECOND)

    def test_caps(self, gpu):
        assert choice(attn_logit_softcapping=30.0) == THIRD
        gpu.broken[THIRD, "attention"] = RuntimeError("no tanh softcapping")
        none = "it has no --attn-logit-softcapping"
        assert choice(attn_logit_softcapping=30.0) == (
            f"math ({THIRD}: no tanh softcapping; {CUDNN}: {none}; {SECOND}: {none}; {EFFICIENT}: {none})"
        )

    def test_heads(self, gpu):
        why = f"{THIRD}: the head size is 20, it needs a multiple of 8 up to 256"
        assert choice(kv_channels=20) == f"{CUDNN} ({why})"

    @pytest.mark.parametrize("error", [ImportError("a"), OSError("b"), AttributeError("c"), TypeError("d"), KeyError()])
    def test_no_error_of_a_trial_ends_set_up(self, gpu, error):
        gpu.broken[THIRD, "attention"] = error
        assert choice() == f"{CUDNN} ({THIRD}: {str(error) or type(error).__name__})"

    def test_the_model_is_what_is_tried(self, gpu):
        fields = {"group_query_attention": True, "num_query_groups": 2, "window_size": "63,0", "kv_channels": 96}
        kernels_of(blocks=True, documents=True, attn_logit_softcapping=9.0, **fields)
        assert gpu.tried == [
            (THIRD, "attention", 96, 96, 4, True, 0.0, 9.0, True),
            (THIRD, "blocks", 96, 96, 4, True, 9.0),
        ]

    def test_unfused_tries_nothing(self, gpu):
        assert kernels_of("unfused").attention is attention.unfused and gpu.tried == []


class TestByName:
    def test_flash(self, gpu):
        assert choice("flash") == THIRD
        gpu.broken[THIRD, "attention"] = RuntimeError("FA3 backward unsupported")
        assert choice("flash") == f"{SECOND} ({THIRD}: FA3 backward unsupported)"

    def test_fused_is_cudnn(self, gpu):
        assert choice("fused") == choice("fused", documents=True) == CUDNN
        assert {name for name, *_ in gpu.tried} == {CUDNN}

    def test_flash_that_cannot_run(self, without_3):
        without_3.broken[SECOND, "attention"] = RuntimeError("No available kernel. Aborting execution.")
        assert refusal("flash", kv_channels=320) == (
            f"{THIRD}: the head size is 320, it needs a multiple of 8 up to 256; "
            f"{SECOND}: No available kernel. Aborting execution."
        )

    def test_flash_with_a_cap(self, without_3):
        assert refusal("flash", attn_logit_softcapping=30.0) == (
            f"{NOT_INSTALLED}; {SECOND}: it has no --attn-logit-softcapping"
        )

    def test_fused_that_cannot_run(self, gpu):
        assert refusal("fused", window_size="63,0") == f"{CUDNN}: torch's has no --window-size"
        assert refusal("fused", attn_logit_softcapping=30.0) == f"{CUDNN}: it has no --attn-logit-softcapping"
        assert refusal("fused", softmax_type="learnable") == f"{CUDNN}: torch's has no --softmax-type"
        assert refusal("fused", bf16=False) == f"{CUDNN}: the dtype is float32, it needs bf16 or fp16"
        gpu.broken[CUDNN, "attention"] = RuntimeError("No available kernel. Aborting execution.")
        assert refusal("fused", kv_channels=320) == f"{CUDNN}: No available kernel. Aborting execution."


class TestBlocks:
    def test_order(self, gpu):
        reasons = []
        for name, kernel in (
            (THIRD, attention_lse.flash_attention_3),
            (SECOND, attention_lse.flash_attention),
            (EFFICIENT, attention_lse.efficient),
        ):
            found = kernels_of(blocks=True)
            assert found.block_attention == kernel
            assert found.block_choice == f"{name} blocks" + (f" ({'; '.join(reasons)})" if reasons else "")
            gpu.broken[name, "blocks"] = RuntimeError("no local attention")
            reasons.append(f"{name}: no local attention")
        assert kernels_of(blocks=True).block_attention == attention_lse.by_rows
        assert kernels_of().block_choice == f"{THIRD} blocks", "without context parallelism nothing is tried"
        assert kernels_of(blocks=True).attention_choice == THIRD, "whole sequences have a choice of their own"

    def test_sinks(self, gpu):
        """Whole sequences go to the kernel of blocks, which is tried although nothing else needs it."""
        gpu.broken[THIRD, "blocks"] = RuntimeError("no")
        found = kernels_of(softmax_type="off-by-one")
        assert found.block_attention == attention_lse.flash_attention
        reason = "a sequence is one block, for --softmax-type"
        assert found.attention_choice == f"{SECOND} blocks ({THIRD}: no; {reason})"

    def test_by_name(self, gpu):
        assert kernels_of("fused", blocks=True).block_attention == attention_lse.efficient
        assert kernels_of("unfused", blocks=True).block_attention == attention_lse.reference
        for name in (THIRD, SECOND):
            gpu.broken[name, "blocks"] = RuntimeError("no")
        assert refusal("flash", blocks=True) == f"{THIRD}: no; {SECOND}: no"

    def test_caps(self, gpu):
        assert kernels_of(blocks=True, attn_logit_softcapping=30.0).block_attention == attention_lse.flash_attention_3
        gpu.broken[THIRD, "blocks"] = RuntimeError("no")
        assert kernels_of(blocks=True, attn_logit_softcapping=30.0).block_attention == attention_lse.by_rows

    def test_dropout(self, gpu):
        assert kernels_of(blocks=True, attention_dropout=0.1).block_choice == (
            "unfused blocks (plain torch in fp32: no fused kernel draws a block's dropout again)"
        )


def on_cpu(asked="auto", **fields):
    config = ModelConfig(**{**MODEL, **fields}, attention_backend=asked)
    cores = [attention_core(config, window) for window in config.windows]
    dtype = getattr(torch, config.dtype_name)
    return choose_attention.choose_attention(cores, asked, dtype, CPU, blocks=True, documents=True)


class TestOnACpu:
    @pytest.mark.parametrize("bf16", [True, False])
    def test_auto(self, bf16, monkeypatch):
        monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.float16})
        found = on_cpu(bf16=bf16)
        assert (found.attention, found.attention_choice) == (choose_attention.fused_on_cpu, "torch SDPA")
        assert (found.blocks, found.block_choice) == (attention_lse.cpu, "fused blocks (torch's flash for CPUs)")

    def test_without_products_of_halves(self, monkeypatch):
        """In fp32: the result is rounded once, where the native kernel rounds in between."""
        monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16})
        found = on_cpu(bf16=True)
        assert found.attention_choice == "torch SDPA (in fp32: this CPU has no bfloat16 products)"
        assert found.block_choice == (
            "fused blocks (torch's flash for CPUs in fp32, this one has no bfloat16 products)"
        )
        data = [random(8, 2, heads, 8, dtype=torch.bfloat16, seed=heads) for heads in (4, 2, 2)]
        for window in (None, 3):
            options = {**PLAIN, "window": window}
            expected = attention.fused(*(x.float() for x in data), **options).bfloat16()
            assert found.attention(*data, **options).equal(expected)
        out, lse = found.blocks.forward(*data, attention_lse.Rule(PLAIN["scores"], 0))
        assert out.dtype == lse.dtype == torch.float32

    def test_caps(self):
        """No fused kernel caps; without one asked for, the reference is what it is without a cap."""
        found = on_cpu(attn_logit_softcapping=30.0)
        assert (found.attention, found.attention_choice) == (
            attention_rows.attention,
            "math (torch's SDPA caps no scores)",
        )
        assert found.blocks is attention_lse.by_rows
        assert on_cpu("unfused", attn_logit_softcapping=30.0).attention is attention.unfused
        of_sinks = on_cpu(softmax_type="learnable")
        assert of_sinks.block_choice == "fused blocks (torch's flash for CPUs)"
        reason = "a sequence is one block, for --softmax-type"
        assert of_sinks.attention_choice == f"fused blocks (torch's flash for CPUs; {reason})"
        assert on_cpu("unfused", softmax_type="learnable").attention is attention.unfused
        assert on_cpu("unfused", attn_logit_softcapping=30.0).blocks is attention_lse.reference

    def test_unfused(self):
        found = on_cpu("unfused", attention_dropout=0.1)
        assert (found.attention, found.attention_choice) == (attention.unfused, "unfused (plain torch, asked for)")
        assert found.block_choice == "unfused blocks (plain torch in fp32, asked for)"

    @pytest.mark.parametrize("asked", ["flash", "fused"])
    def test_kernels_of_a_gpu(self, asked):
        """The command line of a cluster runs on a laptop, and the table says by which kernel."""
        found = on_cpu(asked)
        assert (found.attention, found.attention_choice) == (
            choose_attention.fused_on_cpu,
            f"torch SDPA ({asked} is for GPUs)",
        )
        assert found.blocks is attention_lse.cpu
        assert on_cpu(asked, attn_logit_softcapping=30.0).attention_choice == (
            f"math ({asked} is for GPUs; torch's SDPA caps no scores)"
        )
