"""Part G: training steps of a quarter of Llama-3 8B's layers, and of a 1B model, under several choices of kernels."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu.case import Case, Result, Setting
from benchmarks.gpu.measure import copy_rate, gemm_rate, package
from benchmarks.gpu.record import NotRunError
from benchmarks.gpu.runs import FP8_FORMATS, TOY, TOY_FP8, described, device_of, fp8_flags, measure_speed, start
from megatron.kernels.ops.fp8 import scaled_mm

# 8 of 32 layers and a quarter of the vocabulary, so that the head has the same share as in the whole model.
SLICE_8B = (
    "--preset llama3-8b --num-layers 8 --vocab-size 32064 --make-vocab-size-divisible-by 64 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
)
MODEL_1B = (
    "--preset llama3.2-1b --vocab-size 128256 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 --bf16"
)
HOST_BOUND = "--seq-length 64 --micro-batch-size 1 --global-batch-size 4"
ENGINE = "--transformer-impl transformer_engine"
WAYS = {
    "baseline": "",
    "fp8 blockwise": fp8_flags("blockwise"),
    "fp8 tensorwise": fp8_flags("tensorwise"),
    "fp8 delayed": fp8_flags("delayed"),
    "Transformer Engine": ENGINE,
    "Transformer Engine, fp8 delayed": f"{ENGINE} {fp8_flags('delayed')}",
    "no fused kernels": "--no-persist-layer-norm --no-bias-swiglu-fusion --no-rope-fusion",
    "one microbatch per step": "--global-batch-size 1",
    "no fused gradient accumulation": "--no-gradient-accumulation-fusion",
    "recompute norms and activations": "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func",
}
FIRST = 6  # ways that are measured before the 1B model
ATTENTION = {"FlashAttention": "--attention-backend flash", "cuDNN": "--attention-backend fused"}
# Layers whose kernels take as long as the host needs to launch them.
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part, those that matter most first: the last ones are skipped when time runs out."""
    of = functools.partial
    ceilings: dict[str, float] = {}
    slice_8b, model_1b = (f"{TOY_FP8} --bf16", f"{TOY} --bf16 --num-layers 1") if setting.toy else (SLICE_8B, MODEL_1B)
    ways, models = {**WAYS, **ATTENTION}, {"": model_1b, ", CUDA graphs": f"{model_1b} {GRAPHS}"}
    return [
        Case("ceilings", of(measure_ceilings, setting, ceilings), 4.0),
        *(
            Case(f"8B slice, {name}", of(measure, setting, f"{slice_8b} {flags}", ceilings), 18.0, 90.0)
            for name, flags in list(ways.items())[:FIRST]
        ),
        *(Case(f"1B{name}", of(measure, setting, flags, ceilings), 16.0, 90.0) for name, flags in models.items()),
        *(
            Case(f"1B{name}, time of the host", of(measure_host, setting, flags), 10.0, 60.0)
            for name, flags in models.items()
        ),
        *(
            Case(f"8B slice, {name}", of(measure, setting, f"{slice_8b} {flags}", ceilings), 18.0, 90.0)
            for name, flags in list(ways.items())[FIRST:]
        ),
    ]


def measure_ceilings(setting: Setting, ceilings: dict[str, float]) -> Result:
    """Measures what this machine's products and copies reach now, for the shares of later cases."""
    start(setting)  # before anything else uses the GPU: a run sets its environment first
    ceilings["a large GEMM"] = gemm_rate(setting)
    copied = copy_rate(setting)
    values = {"gemm_tflops": ceilings["a large GEMM"], "copy_gbs": copied}
    return Result(f"a large bf16 GEMM {values['gemm_tflops']:.4g} TFLOP/s, a copy {copied:.4g} GB/s", values)


def measure(setting: Setting, flags: str, ceilings: dict[str, float]) -> Result:
    """Trains, and measures the steps. Raises NotRunError for flags that have no effect or cannot run here."""
    needs(setting, flags)
    speed = measure_speed(flags, setting, start(setting))
    values: dict[str, Any] = {**vars(speed), "step": speed.step.ms, "spread": speed.step.spread}
    return Result(described(speed, list(ceilings.items())), values)


def needs(setting: Setting, flags: str) -> None:
    """Raises NotRunError if the framework lacks a flag, or this GPU or an installation lacks what it asks for.

    On a CPU the flags of kernels for GPUs are accepted, so a dry run plays them.
    """
    words = flags.split()
    if not setting.cuda:
        return
    if "--fp8-recipe" in words:
        recipe = words[words.index("--fp8-recipe") + 1]
        reason = scaled_mm.why_not(recipe, device_of(setting), FP8_FORMATS[recipe])
        if reason is not None:
            raise NotRunError(reason)
    if "--transformer-impl" in words:
        package("transformer_engine.pytorch")


def measure_host(setting: Setting, flags: str) -> Result:
    """Measures steps of so few tokens that the GPU waits for the host: the time that the host needs to queue a step."""
    needs(setting, flags)
    speed = measure_speed(f"{flags} {HOST_BOUND}", setting, start(setting))
    per_microbatch = speed.step.ms / 4
    return Result(
        f"{speed.step.ms:.4g} ms per step of 4 microbatches of 64 tokens, {per_microbatch:.4g} per microbatch",
        {"step_ms": speed.step.ms, "spread": speed.step.spread, "microbatch_ms": per_microbatch},
    )
