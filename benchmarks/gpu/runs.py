"""Training runs of the framework inside this process, from the flags of pretrain_gpt.py."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.case import COMPILE_SECONDS, Setting
from benchmarks.gpu.measure import Timing, combine
from megatron.command_line.read import parse
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.core.groups import Groups
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.spec.decoder import decoder_spec
from megatron.spec.flops import train_flops
from megatron.training.process import start_process
from megatron.training.setup import build
from megatron.training.trainer import Trainer

# Random data; the longest run that a case may need; no evaluation, no worker processes, no log lines.
COMMON = (
    "--tokenizer-type NullTokenizer --mock-data --train-iters 1000 --lr 1e-3 --lr-decay-style constant --eval-iters 0 "
    "--num-workers 0 --log-interval 1000000"
)
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
# A tiny decoder for checks of numbers: 4 layers, grouped heads, and microbatches for a pipeline.
DECODER = (
    f"{LLAMA} --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 64 --vocab-size 256 --micro-batch-size 1 --global-batch-size 4"
)
# The same with widths that every recipe of FP8 can multiply, also on two tensor-parallel ranks: multiples of 128.
DECODER_FP8 = f"{DECODER} --hidden-size 256 --ffn-hidden-size 512 --kv-channels 64 --seq-length 128"
# With experts in place of the MLP.
DECODER_EXPERTS = f"{DECODER} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
TOY, TOY_FP8, TOY_EXPERTS = (
    flags.replace("--num-layers 4", "--num-layers 2").replace("--global-batch-size 4", "--global-batch-size 2")
    for flags in (DECODER, DECODER_FP8, DECODER_EXPERTS)
)
# A run of part G or J before its first step: the trials of its kernels, and its weights.
BUILD_SECONDS = 3.0
PLANNED_RATE = 400e12  # FLOP/s of a training step: what to plan with, not what to expect
# The format that docs/fp8.md advises for each recipe.
FP8_FORMATS = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


@dataclass(frozen=True)
class Speed:
    """A run's steps: their time, what they computed per second, and the bytes that were allocated at the peak."""

    step: Timing
    tokens_per_second: float
    tflops: float
    peak: int
    loss: float


def fp8_flags(recipe: str) -> str:
    """Returns the flags of FP8 products by a recipe."""
    return f"--fp8-format {FP8_FORMATS[recipe]} --fp8-recipe {recipe}"


def configured(flags: str, setting: Setting, world_size: int = 1) -> RunConfig:
    """Returns a checked run on the setting's device."""
    run = parse(f"{COMMON} --device {setting.device} {flags}".split(), description="")
    check(run, world_size)
    return run


def run_seconds(flags: str, steps: int, compiled: int = 0) -> float:
    """Returns the seconds to plan on a GPU for some steps of a run, with so many kernels that are compiled first."""
    run = configured(flags, Setting("cuda", False, Path()))
    samples = run.train.global_batch_size or run.train.micro_batch_size
    assert samples is not None
    flops = step_flops(run, samples)
    return BUILD_SECONDS + compiled * COMPILE_SECONDS + steps * flops / PLANNED_RATE


@functools.cache
def start(setting: Setting) -> Groups:
    """Prepares this process as that of a run, the environment of CUDA included; returns the groups of a world of
    one."""
    return start_process(configured(DECODER, setting).parallel, 0, 1, 0, 1)[0]


def trainer_of(flags: str, setting: Setting, groups: Groups) -> Trainer:
    """Builds a run of one process."""
    return build(configured(flags, setting), groups, device_of(setting))


def device_of(setting: Setting) -> torch.device:
    """Returns the device with its index, which the framework compares devices by."""
    return torch.device("cuda", 0) if setting.cuda else torch.device("cpu")


def losses(flags: str, steps: int, setting: Setting, groups: Groups) -> list[float]:
    """Returns the losses of the first steps."""
    trainer = trainer_of(flags, setting, groups)
    return [trainer.train_step().loss for _ in range(steps)]


def measure_speed(flags: str, setting: Setting, groups: Groups, warm: int = 2, timed: int = 4) -> Speed:
    """Takes some steps to warm up, then `timed` more, in two repeats.

    They follow each other as in a run: a step ends when the host has read its loss, which is after it has queued the
    next. So the host gets ahead in the first step, and is caught up with in the last: these two more are not counted.
    """
    meter, trainer = Peak(setting), trainer_of(flags, setting, groups)
    for _ in range(warm):
        trainer.train_step()
    meter.reset()
    for _ in range(timed + 2):
        trainer.queue_step()
    reports = list(trainer.reports(wait=True))[1:-1]
    ms = [1e3 * report.seconds for report in reports]
    step = combine([ms[: timed // 2], ms[timed // 2 :]])
    peak = meter.bytes()
    flops = step_flops(trainer.run, reports[-1].global_batch_size)
    return Speed(step, step.rate(reports[-1].tokens), step.rate(flops) / 1e12, peak, reports[-1].loss)


def step_flops(run: RunConfig, samples: int) -> float:
    """Returns the model FLOPs of a step; causal attention counts half."""
    assert run.data.seq_length
    return train_flops(decoder_spec(run.model), run.data.seq_length, samples)


class Peak:
    """The largest number of bytes that tensors of the device took since `reset`, above those before this object."""

    def __init__(self, setting: Setting) -> None:
        gc.collect()
        self._cpu = None if setting.cuda else CpuMemory()
        self._before = torch.cuda.memory_allocated() if self._cpu is None else self._cpu.allocated

    def reset(self) -> None:
        """Forgets the peak so far."""
        if self._cpu is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._cpu.reset_peak()

    def bytes(self) -> int:
        """Returns the peak."""
        return (torch.cuda.max_memory_allocated() if self._cpu is None else self._cpu.peak) - self._before


def described(speed: Speed) -> str:
    """Returns the figures in words."""
    return (
        f"{speed.step.ms:.4g} ms per step, {speed.tokens_per_second:.4g} tokens/s, {speed.tflops:.4g} TFLOP/s, "
        f"peak {speed.peak / 2**30:.3g} GiB, loss {speed.loss:.5f}"
    )
