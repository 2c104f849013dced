"""Part G: training steps of a quarter of Llama-3 8B's layers, of a 1B model, and of layers with experts, under several
choices of kernels."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.measure import package
from benchmarks.gpu.record import NotRunError
from benchmarks.gpu.runs import (
    FP8_FORMATS,
    TOY,
    TOY_EXPERTS,
    TOY_FP8,
    described,
    device_of,
    fp8_flags,
    measure_speed,
    run_seconds,
    start,
    trainer_of,
)
from megatron.kernels.ops.fp8 import scaled_mm

# 8 of 32 layers and a quarter of the vocabulary, so that the head has the same share as in the whole model.
SLICE_8B = (
    "--preset llama3-8b --num-layers 8 --vocab-size 32064 --make-vocab-size-divisible-by 64 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
)
MODEL_1B = (
    "--preset llama3.2-1b --vocab-size 128256 --seq-length 4096 --micro-batch-size 4 --global-batch-size 16 --bf16"
)
# 4 of 48 layers, with all 128 experts of each.
EXPERTS = (
    "--preset qwen3-30b-a3b --num-layers 4 --vocab-size 32064 --make-vocab-size-divisible-by 64 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 4 --bf16"
)
HOST_BOUND = "--seq-length 64 --micro-batch-size 1 --global-batch-size 4"
ENGINE = "--transformer-impl transformer_engine"
PLAIN_KERNELS = "--no-persist-layer-norm --no-bias-swiglu-fusion --no-rope-fusion"
# Ways to train the 8B slice, and how many kernels each compiles that those before it did not.
WAYS = {
    "baseline": ("", 0),
    "fp8 blockwise": (fp8_flags("blockwise"), 6),
    "fp8 tensorwise": (fp8_flags("tensorwise"), 4),
    "fp8 delayed": (fp8_flags("delayed"), 2),
    "Transformer Engine": (ENGINE, 5),
    "Transformer Engine, fp8 delayed": (f"{ENGINE} {fp8_flags('delayed')}", 0),
    "no fused kernels": (PLAIN_KERNELS, 0),
    "one microbatch per step": ("--global-batch-size 1", 0),
    "no fused gradient accumulation": ("--no-gradient-accumulation-fusion", 0),
    "recompute norms and activations": ("--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func", 2),
    "FlashAttention": ("--attention-backend flash", 0),
    "cuDNN": ("--attention-backend fused", 2),
}
FUSED_KERNELS = 20  # in Triton, of a dense run
# Layers whose kernels take as long as the host needs to launch them.
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
EXPERTS_FP8 = f"{EXPERTS} {fp8_flags('blockwise')}"
MODELS = {
    "1B": MODEL_1B,
    "1B, CUDA graphs": f"{MODEL_1B} {GRAPHS}",
    "experts": EXPERTS,
    "experts, fp8 blockwise": EXPERTS_FP8,
}
TOYS = {"1B": f"{TOY} --bf16 --num-layers 1", "experts": f"{TOY_EXPERTS} --bf16"}
TOYS["1B, CUDA graphs"] = f"{TOYS['1B']} {GRAPHS}"
TOYS["experts, fp8 blockwise"] = f"{TOYS['experts']} {fp8_flags('blockwise')}"
COMPILED = {"1B": 4, "1B, CUDA graphs": 4, "experts": 4, "experts, fp8 blockwise": 10}  # kernels, as in WAYS
WARM, TIMED = 2, 4
PARITY = "--seq-length 2048 --global-batch-size 1"
PARITY_STEPS = 3
# Relative, of losses and of the norm of the first gradient. Both runs round activations to bf16, at other places.
PARITY_LIMITS = 5e-3, 2e-2


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    slice_8b = f"{TOY_FP8} --bf16" if setting.toy else SLICE_8B
    models = TOYS if setting.toy else MODELS
    steps = WARM + TIMED + 2
    return [
        Case(
            "8B slice, parity",
            of(parity, setting, slice_8b if setting.toy else f"{slice_8b} {PARITY}"),
            run_seconds(f"{SLICE_8B} {PARITY}", 2 * PARITY_STEPS, FUSED_KERNELS),
        ),
        *(
            Case(
                f"8B slice, {name}",
                of(measure, setting, f"{slice_8b} {flags}"),
                run_seconds(f"{SLICE_8B} {flags}", steps, compiled),
            )
            for name, (flags, compiled) in WAYS.items()
        ),
        *(
            Case(name, of(measure, setting, models[name]), run_seconds(flags, steps, compiled=COMPILED[name]))
            for name, flags in MODELS.items()
        ),
        *(
            Case(f"{name}, time of the host", of(measure_host, setting, models[name]), run_seconds(flags, 1))
            for name, flags in MODELS.items()
        ),
    ]


def parity(setting: Setting, flags: str) -> Result:
    """Checks that a run of the fastest kernels and one of plain torch have the same losses and the same first
    gradient."""
    groups = start(setting)
    plain = f"{PLAIN_KERNELS} --attention-backend unfused --no-gradient-accumulation-fusion"
    reports = {}
    for name, more in (("fast", ""), ("plain", plain)):
        trainer = trainer_of(f"{flags} {more}", setting, groups)
        reports[name] = [trainer.train_step() for _ in range(PARITY_STEPS)]
        del trainer
    losses, norms = (
        [[getattr(report, key) for report in run] for run in reports.values()] for key in ("loss", "grad_norm")
    )
    off = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    off_norm = abs(norms[0][0] - norms[1][0]) / norms[1][0]
    values: dict[str, Any] = {"losses": losses, "norms": norms, "difference": off, "norm_difference": off_norm}
    said = f"losses {losses[0]} and in plain torch {losses[1]}: off by {off:.1e}, the first norm by {off_norm:.1e}"
    check(off <= PARITY_LIMITS[0] and off_norm <= PARITY_LIMITS[1], said, values)
    return Result(said, values)


def measure(setting: Setting, flags: str) -> Result:
    """Trains, and measures the steps. Raises NotRunError for flags that have no effect or cannot run here."""
    needs(setting, flags)
    speed = measure_speed(flags, setting, start(setting), WARM, TIMED)
    values: dict[str, Any] = {**vars(speed), "step": speed.step.ms, "spread": speed.step.spread}
    return Result(described(speed), values)


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
