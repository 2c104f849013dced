"""AdamW on the CPU: every implementation of a step, in ms and GB/s, compared with the memory bandwidth.

All implementations work on the same flat tensors and alternate in one process; medians over the rounds, and the fastest
and slowest. GB/s count each tensor once for a read and once for a write, as in one pass; implementations with more
passes therefore show less. *limit / ms* and *ms / ours* are medians of the ratios within a round. The limits
(cpu_adam.cpp) access the streams of a step, read and written in place like a step, with almost no arithmetic; the triad
characterises the machine. DeepSpeed's kernel is in the table if the package `deepspeed` can be imported (and its
extension built).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.backends import cpu_adam
from megatron.kernels.ops.adam import adamw_step, separate

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
SETTINGS = {"step": 10, "lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY}
COMPARISON = "for comparison"
SLOW = 4  # foreach and the for-loop take part in one of this many rounds
PIECES = 200  # number of tensors for foreach and the for-loop, as in a model: one flat tensor is slower for them


class Memory:
    """The tensors of all implementations. grad16 and out16 are bf16, the rest fp32; spare receives converted
    gradients."""

    def __init__(self, size: int) -> None:
        self.param, self.grad, self.spare = torch.randn(size), torch.randn(size) * 1e-2, torch.zeros(size)
        self.exp_avg, self.exp_avg_sq = torch.zeros(size), torch.full((size,), 1e-4)
        self.grad16, self.out16 = self.grad.bfloat16(), self.param.bfloat16()


class Way(NamedTuple):
    """One implementation of a step. `width` is bytes per element in one pass. `every`: it runs in each such round."""

    name: str
    width: int
    step: Callable[[], object]
    every: int = 1


def main() -> None:
    """Prints one table per group of implementations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100_000_000, help="elements (default 1e8: 2.4 GB)")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    memory = Memory(args.size)
    with tempfile.TemporaryDirectory() as folder:
        streams = Streams(memory, Path(folder))
        groups = {
            "fp32": [Way("limit: the same streams", 28, streams.fp32), *fp32_ways(memory)],
            "bf16 gradient in, bf16 parameters out": [
                Way("limit: the same streams", 28, streams.mixed),
                *mixed_ways(memory),
            ],
            COMPARISON: [
                Way("triad", 12, streams.triad),
                Way("torch mul_ in place", 8, lambda: memory.spare.mul_(1.0)),
            ],
        }
        for group in groups.values():
            for way in group:
                way.step()  # warm-up
        times: dict[str, list[dict[str, float]]] = {title: [] for title in groups}
        for round_ in range(args.rounds):
            for title, group in groups.items():
                times[title].append(measured(group, round_))
    print(f"{args.size:,} elements, {torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds")
    print(f"one-pass kernel: {cpu_adam.missing() or 'built, and runs here'}")
    for title, group in groups.items():
        print_group(title, group, times[title], args.size)


def measured(group: Sequence[Way], round_: int) -> dict[str, float]:
    """Returns the milliseconds of each implementation in this round. The order rotates, because it affects the
    result."""
    taken, first = {}, round_ % len(group)
    for way in (*group[first:], *group[:first]):
        if round_ % way.every == 0:
            started = time.perf_counter()
            way.step()
            taken[way.name] = (time.perf_counter() - started) * 1000
    return taken


def print_group(title: str, group: Sequence[Way], rounds: Sequence[dict[str, float]], size: int) -> None:
    """Prints a group. Its first entry is the limit, the second is ours."""
    print(f"\n| {title} | ms | fastest - slowest | GB/s | limit / ms | ms / ours |\n|---|---|---|---|---|---|")
    for way in group:
        own = [taken for taken in rounds if way.name in taken]
        ms = sorted(taken[way.name] for taken in own)
        of_limit = statistics.median(taken[group[0].name] / taken[way.name] for taken in own)
        to_ours = statistics.median(taken[way.name] / taken[group[1].name] for taken in own)
        rate = way.width * size / statistics.median(ms) / 1e6
        ratios = f"{of_limit:.2f} | {to_ours:.2f}" if title != COMPARISON else "|"
        print(f"| {way.name} | {statistics.median(ms):.1f} | {ms[0]:.1f} - {ms[-1]:.1f} | {rate:.1f} | {ratios} |")


def fp32_ways(memory: Memory) -> list[Way]:
    """Returns the implementations with everything in fp32."""
    tensors = memory.param, memory.grad, memory.exp_avg, memory.exp_avg_sq
    ways = [
        Way("ours", 28, lambda: adamw_step(*tensors, **SETTINGS)),
        Way("torch AdamW, fused", 28, torch_adamw(memory, 1, fused=True)),
        Way(f"torch AdamW, foreach, {PIECES} tensors", 28, torch_adamw(memory, PIECES, foreach=True), SLOW),
        Way(f"torch AdamW, for-loop, {PIECES} tensors", 28, torch_adamw(memory, PIECES, foreach=False), SLOW),
    ]
    if importlib.util.find_spec("deepspeed"):
        ways.append(Way("DeepSpeedCPUAdam", 28, deepspeed_adam(memory)))
    return ways


def mixed_ways(memory: Memory) -> list[Way]:
    """Returns the implementations with fp32 parameters and moments, bf16 gradients in, bf16 parameters out."""
    tensors = memory.param, memory.grad16, memory.exp_avg, memory.exp_avg_sq

    def whole_copies() -> None:
        memory.spare.copy_(memory.grad16)
        separate(memory.param, memory.spare, memory.exp_avg, memory.exp_avg_sq, **SETTINGS)
        memory.out16.copy_(memory.param)

    return [
        Way("ours, one pass", 28, lambda: adamw_step(*tensors, out=memory.out16, **SETTINGS)),
        Way("ours, one pass, gradient divided", 28, lambda: adamw_step(*tensors, out=memory.out16, divisor=1.5, **SETTINGS)),
        Way("ours without a compiler: torch in pieces", 28, lambda: separate(*tensors, out=memory.out16, **SETTINGS)),
        Way("torch fused with two copies", 28, whole_copies),
    ]  # fmt: skip


def torch_adamw(memory: Memory, pieces: int, **how: bool) -> Callable[[], object]:
    """Returns a step of torch's optimizer on views of the memory."""
    piece = -(-memory.param.numel() // pieces)
    views = [t.split(piece) for t in (memory.param, memory.grad, memory.exp_avg, memory.exp_avg_sq)]
    optimizer = torch.optim.AdamW(views[0], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **how)
    for param, grad, exp_avg, exp_avg_sq in zip(*views, strict=True):
        param.grad = grad
        optimizer.state[param].update(step=torch.tensor(9.0), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return optimizer.step


def deepspeed_adam(memory: Memory) -> Callable[[], object]:
    """Returns a step of DeepSpeed's CPU optimizer on the same memory."""
    optimizers = importlib.import_module("deepspeed.ops.adam")
    param = torch.nn.Parameter(memory.param)
    param.grad = memory.grad
    optimizer = optimizers.DeepSpeedCPUAdam([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)
    optimizer.state[param].update(step=9, exp_avg=memory.exp_avg, exp_avg_sq=memory.exp_avg_sq)
    return optimizer.step


class Streams:
    """The functions of cpu_adam.cpp over the whole memory, on torch's number of threads."""

    def __init__(self, memory: Memory, folder: Path) -> None:
        library, source = folder / "streams.so", Path(__file__).with_suffix(".cpp")
        flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["c++", *flags, source, "-o", library], check=True)
        self._library, self._memory = ctypes.CDLL(str(library)), memory

    def fp32(self) -> None:
        m = self._memory
        self._run("stream_fp32", m.grad, m.param, m.exp_avg, m.exp_avg_sq)

    def mixed(self) -> None:
        m = self._memory
        self._run("stream_mixed", m.grad16, m.param, m.exp_avg, m.exp_avg_sq, m.out16)

    def triad(self) -> None:
        m = self._memory
        self._run("triad", m.param, m.grad, m.spare)

    def _run(self, name: str, *tensors: Tensor) -> None:
        addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        sizes = ctypes.c_size_t(tensors[0].numel()), ctypes.c_size_t(torch.get_num_threads())
        self._library[name](addresses, *sizes)


if __name__ == "__main__":
    main()
