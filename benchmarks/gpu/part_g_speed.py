"""Part G: training steps of a quarter of Llama-3 8B's layers, and of a 1B model, under several choices of kernels."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu.case import Case, Result, Setting
from benchmarks.gpu.measure import copy_rate, gemm_rate
from benchmarks.gpu.record import LaterError
from benchmarks.gpu.runs import TOY, described, measure_speed, start

# 8 of 32 layers and a quarter of the vocabulary, so that the head has the same share as in the whole model.
SLICE_8B = (
    "--preset llama3-8b --num-layers 8 --vocab-size 32064 --make-vocab-size-divisible-by 64 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
)
MODEL_1B = (
    "--preset llama3.2-1b --vocab-size 128256 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 --bf16"
)
HOST_BOUND = "--seq-length 64 --micro-batch-size 1 --global-batch-size 4"
WAYS = {
    "baseline": "",
    "one microbatch per step": "--global-batch-size 1",
    "no fused gradient accumulation": "--no-gradient-accumulation-fusion",
    "recompute norms and activations": "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func",
}
NOT_YET = {
    "fused norm, SwiGLU and RoPE": "the framework has no fused kernels of its own",
    "fused cross entropy": "the framework has no fused kernels of its own",
    "asynchronous update": "every step waits for the gradient norm on the host",
    "fp8 tensorwise": "the framework does not train in fp8",
    "fp8 blockwise": "the framework does not train in fp8",
    "Transformer Engine": "--transformer-impl transformer_engine is taken as local",
}


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    ceilings: dict[str, float] = {}
    slice_8b, model_1b = (f"{TOY} --bf16", f"{TOY} --bf16 --num-layers 1") if setting.toy else (SLICE_8B, MODEL_1B)
    return [
        Case("ceilings", of(measure_ceilings, setting, ceilings), 4.0),
        *(
            Case(f"8B slice, {name}", of(measure, setting, f"{slice_8b} {flags}", ceilings), 25.0, 90.0)
            for name, flags in WAYS.items()
        ),
        *(
            Case(f"8B slice, {name}", of(measure_attention, setting, slice_8b, asked, ceilings), 25.0, 90.0)
            for name, asked in (("FlashAttention", "flash"), ("cuDNN", "fused"))
        ),
        *(Case(f"8B slice, {name}", of(later, reason)) for name, reason in NOT_YET.items()),
        Case("1B, baseline", of(measure, setting, model_1b, ceilings), 20.0, 90.0),
        Case("1B, time of the host", of(measure_host, setting, model_1b), 12.0, 60.0),
        Case("1B, CUDA graphs", of(later, "the framework does not capture CUDA graphs")),
    ]


def later(reason: str) -> Result:
    """A choice that a run does not have."""
    raise LaterError(reason)


def measure_ceilings(setting: Setting, ceilings: dict[str, float]) -> Result:
    """Measures what this machine's products and copies reach now, for the shares of later cases."""
    start(setting)  # before anything else uses the GPU: a run sets its environment first
    ceilings["a large GEMM"] = gemm_rate(setting)
    copied = copy_rate(setting)
    values = {"gemm_tflops": ceilings["a large GEMM"], "copy_gbs": copied}
    return Result(f"a large bf16 GEMM {values['gemm_tflops']:.4g} TFLOP/s, a copy {copied:.4g} GB/s", values)


def measure(setting: Setting, flags: str, ceilings: dict[str, float]) -> Result:
    """Trains, and measures the steps."""
    speed = measure_speed(flags, setting, start(setting))
    values: dict[str, Any] = {**vars(speed), "step": speed.step.ms, "spread": speed.step.spread}
    return Result(described(speed, list(ceilings.items())), values)


def measure_attention(setting: Setting, flags: str, asked: str, ceilings: dict[str, float]) -> Result:
    """The baseline has the first kernel that can run; --attention-backend flash is FlashAttention, fused is cuDNN."""
    setting.needs_cuda(f"--attention-backend {asked}")
    return measure(setting, f"{flags} --attention-backend {asked}", ceilings)


def measure_host(setting: Setting, flags: str) -> Result:
    """Measures steps of so few tokens that the GPU waits for the host: the time that the host needs to queue a step."""
    speed = measure_speed(f"{flags} {HOST_BOUND}", setting, start(setting))
    per_microbatch = speed.step.ms / 4
    return Result(
        f"{speed.step.ms:.4g} ms per step of 4 microbatches of 64 tokens, {per_microbatch:.4g} per microbatch",
        {"step_ms": speed.step.ms, "spread": speed.step.spread, "microbatch_ms": per_microbatch},
    )
