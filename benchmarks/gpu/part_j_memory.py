"""Part J: measured against planned memory, what offload moves and costs, and whether training goes on as it should."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.continued import resumes_and_repeats
from benchmarks.gpu.part_g_speed import needs
from benchmarks.gpu.parts import START_SECONDS
from benchmarks.gpu.runs import (
    LLAMA,
    Peak,
    described,
    device_of,
    fp8_flags,
    losses,
    measure_speed,
    run_seconds,
    start,
    trainer_of,
)
from benchmarks.gpu.runs import TOY as SMALL_DECODER
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.planner.memory.plan import plan_memory

MODEL = "--preset llama3.2-1b --num-layers 8 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --bf16"
TOY = (
    f"{LLAMA} --num-layers 6 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 128 "
    "--vocab-size 512 --micro-batch-size 1 --bf16"
)
GEMM_LAST = "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func"
RECOMPUTE = {
    "no recompute": "",
    "norms and activations again": GEMM_LAST,
    "whole layers again": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
CPU_OPTIMIZER = "--optimizer-cpu-offload --optimizer-offload-fraction"
OFFLOAD = {
    "nothing": "",
    "activations 50 %": "--pipeline-offload-ratio 0.5",
    "activations 100 %": "--pipeline-offload-ratio 1",
    "optimizer 50 %": f"{CPU_OPTIMIZER} 0.5",
    "optimizer 100 %": f"{CPU_OPTIMIZER} 1",
    "weights of 4 layers": "--cpu-offloading-weights --cpu-offloading-num-layers 4",
}
# Of a step's peak. cuBLAS keeps work space that the plan does not count.
PLAN_LIMIT, WORK_SPACE = 0.03, {"cuda": 96 << 20, "cpu": 1 << 16}
# Losses with and without offload: the update on the CPU, and atomic additions on a GPU, round in another order.
OFFLOAD_LIMIT = 1e-3
TRAINED_STEPS, EMULATED_STEPS = 150, 50
SMALL_STEP_SECONDS = 0.05  # of a tiny model: the host's
HOST_STEPS_SECONDS = 8.0  # of the steps whose update the CPU computes
# Wide enough for every recipe of FP8.
TRAINED_FLAGS = f"{SMALL_DECODER} --seq-length 64 --hidden-size 128 --kv-channels 64 --ffn-hidden-size 256 --lr 2e-3"
TRAINED_WAYS = {
    "bf16": "--bf16",
    **{f"fp8 {recipe}": f"--bf16 {fp8_flags(recipe)}" for recipe in ("blockwise", "delayed")},
}
TRAINED_LIMIT, LEARNT = 0.05, 0.5


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    model = TOY if setting.toy else MODEL
    without: dict[str, float] = {}
    fp32 = functools.cache(functools.partial(train_on_cpu, setting))
    return [
        *(
            Case(f"plan, {name}", of(plan, setting, f"{model} {flags}"), run_seconds(f"{MODEL} {flags}", 3))
            for name, flags in RECOMPUTE.items()
        ),
        Case("bus", of(bus, setting)),
        *(
            Case(
                f"offload, {name}",
                of(offload, setting, name, f"{model} {flags}", without),
                run_seconds(f"{MODEL} {flags}", 4) + (HOST_STEPS_SECONDS if "optimizer" in name else 0.0),
            )
            for name, flags in OFFLOAD.items()
        ),
        *(
            Case(f"training in {name}", of(train, setting, flags, fp32), TRAINED_STEPS * SMALL_STEP_SECONDS)
            for name, flags in TRAINED_WAYS.items()
        ),
        Case("save, resume, repeat", of(resumes_and_repeats, setting), 3 * START_SECONDS + 5.0),
    ]


def plan(setting: Setting, flags: str) -> Result:
    """Compares the peak of the third step with the planned one."""
    groups = start(setting)
    meter = Peak(setting)
    trainer = trainer_of(flags, setting, groups)
    for _ in range(2):
        trainer.train_step()
    meter.reset()
    trainer.train_step()
    measured = meter.bytes()
    (planned,) = plan_memory(trainer.run, trainer.settings, trainer.target)
    off = measured - planned.peak
    values = {"planned": planned.peak, "measured": measured, "moment": planned.moment}
    check(
        -PLAN_LIMIT * planned.peak <= off <= PLAN_LIMIT * planned.peak + WORK_SPACE[setting.device],
        f"planned {planned.peak / 2**20:.1f} MiB at {planned.moment}, measured {measured / 2**20:.1f} MiB",
        values,
    )
    return Result(
        f"planned {planned.peak / 2**20:.1f} MiB at {planned.moment}, measured {100 * off / planned.peak:+.2f} %",
        values,
    )


def bus(setting: Setting) -> Result:
    """Measures the framework's copies between host and device."""
    device = device_of(setting)
    pool = HostPool(pinned=setting.cuda)
    out, back = measure_bandwidth(CopyEngine(Streams(device, Timeline(device))), pool, device)
    return Result(f"{out / 1e9:.1f} GB/s to the host, {back / 1e9:.1f} GB/s to the device", {"out": out, "back": back})


def offload(setting: Setting, name: str, flags: str, without: dict[str, float]) -> Result:
    """Measures steps with a kind of offload, and compares their loss with that of no offload, which runs first."""
    speed = measure_speed(flags, setting, start(setting), warm=2, timed=2)
    without[name] = speed.loss
    values: dict[str, Any] = {"ms": speed.step.ms, "peak": speed.peak, "loss": speed.loss}
    expected = without.get("nothing")
    if expected is None:
        return Result(f"{described(speed)}; no run without offload to compare with", values)
    off = abs(speed.loss - expected) / abs(expected)
    check(off <= OFFLOAD_LIMIT, f"loss {speed.loss:.6f}, and {expected:.6f} without offload")
    return Result(f"{described(speed)}; loss off by {off:.0e}", {**values, "difference": off})


def train_on_cpu(setting: Setting) -> list[float]:
    """Trains a tiny model in fp32 on the CPU: it learns. Returns its losses."""
    cpu = Setting("cpu", setting.toy, setting.out)
    found = losses(TRAINED_FLAGS, TRAINED_STEPS, cpu, start(cpu))
    check(end_of(found) <= LEARNT * found[0], f"fp32 on the CPU went from {found[0]:.3f} to {end_of(found):.3f} only")
    return found


def train(setting: Setting, flags: str, fp32: Callable[[], list[float]]) -> Result:
    """Trains the same model on the device: it ends at the same loss."""
    needs(setting, flags)
    # The emulation of FP8 on a CPU takes long.
    steps = EMULATED_STEPS if "--fp8-format" in flags and not setting.cuda else TRAINED_STEPS
    expected = fp32()[:steps]
    found = losses(f"{TRAINED_FLAGS} {flags}", steps, setting, start(setting))
    check(
        abs(end_of(found) - end_of(expected)) <= TRAINED_LIMIT * expected[0],
        f"it ends at {end_of(found):.3f}, fp32 on the CPU at {end_of(expected):.3f}",
    )
    return Result(
        f"{steps} steps, loss {found[0]:.3f} to {end_of(found):.3f}, and to {end_of(expected):.3f} in fp32 on the CPU",
        {"device": found[::10], "fp32_cpu": expected[::10]},
    )


def end_of(curve: list[float]) -> float:
    """Returns the mean of the last losses."""
    return sum(curve[-10:]) / 10
