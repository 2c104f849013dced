"""A training step with optimizer state on the device and offloaded: time and bytes, alternating in one process.

On the CPU offloaded state is also in host memory, so a copy runs at memory bandwidth; the table then shows the
additional work of offload, and how much of it the thread overlaps. With --disk the state is offloaded to files in a
folder. On CUDA add sizes: --hidden 2048 --layers 16.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time

import torch

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.data import DataConfig
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.device import choose_device, synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import create_groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.batch import make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep

MIB = 1024**2


class Side:
    """A model in training with one placement of the optimizer state."""

    def __init__(self, args: argparse.Namespace, offload: OffloadSettings, precise: bool, device: torch.device) -> None:
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        config = ModelConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.hidden // 64,
            ffn_hidden_size=args.hidden * 11 // 4, vocab_size=args.vocab, max_position_embeddings=args.seq,
            make_vocab_size_divisible_by=64, position_embedding_type="rope", normalization="RMSNorm", swiglu=True,
            add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, bf16=args.dtype == "bf16",
        )  # fmt: skip
        rng = RngTracker(1, groups, device)
        self.model = GPTModel(Build(config, groups, False, choose_kernels(config, device), rng, device))
        initialize(local_parameters(self.model), seed=1)
        settings = DataParallelSettings(overlap_reduce=True)
        self.data_parallel = DataParallel(self.model, groups, settings, device, late_updates=offload.overlap)
        low = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "use_precision_aware_optimizer": True}
        optimizer = OptimizerConfig(**low) if precise else OptimizerConfig()
        self.optimizer = Optimizer(optimizer, self.data_parallel, groups, fp16=False, offload=offload)
        timers = Timers(0, lambda: None)
        self._step = TrainStep(self.model, self.data_parallel, self.optimizer, groups, timers, per_token=False)
        ids = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(5))
        self._batch = [make_batch(part.to(device), 0, DataConfig()) for part in ids.chunk(args.microbatches)]
        self._device = device

    def steps(self, count: int) -> tuple[float, float]:
        """Returns (seconds, CPU seconds of all cores) per step; deferred work counts in the next step, or in the last
        one.
        """
        synchronize(self._device)
        started, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._step.forward_backward(self._batch)
            self._step.update(1e-4, 0.1)
        self.data_parallel.synchronize()
        synchronize(self._device)
        return (time.perf_counter() - started) / count, (time.process_time() - worked) / count


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("layers", 4),
        ("hidden", 384),
        ("vocab", 8192),
        ("seq", 256),
        ("batch", 4),
        ("microbatches", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    device = choose_device(args.device, 0)
    all_on_cpu = OffloadSettings(mode=UPDATE, fraction=1.0, chunk_size=args.chunk)
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "on the device": OffloadSettings(chunk_size=args.chunk),
            "fraction 0": OffloadSettings(chunk_size=args.chunk),
            "CPU updates 50 %": dataclasses.replace(all_on_cpu, fraction=0.5),
            "CPU updates 50 %, overlap": dataclasses.replace(all_on_cpu, fraction=0.5, overlap=True),
            "CPU updates 100 %": all_on_cpu,
            "CPU updates 100 %, overlap": dataclasses.replace(all_on_cpu, overlap=True),
            "states in host memory": dataclasses.replace(all_on_cpu, mode=STATES),
        }
        if args.disk:
            ways["CPU updates 100 %, disk"] = dataclasses.replace(all_on_cpu, directory=folder)
            ways["states on disk"] = dataclasses.replace(all_on_cpu, mode=STATES, directory=folder)
        sides = {name: Side(args, offload, False, device) for name, offload in ways.items()}
        sides["moments in bf16"] = Side(args, OffloadSettings(chunk_size=args.chunk), True, device)
        report(args, sides)


def report(args: argparse.Namespace, sides: dict[str, Side]) -> None:
    """Measures and prints; the order changes from round to round."""
    count = sum(parameter.numel() for parameter in next(iter(sides.values())).model.parameters())
    print(
        f"{count / 1e6:.1f} M parameters, {args.dtype}, {args.batch} x {args.seq} tokens in {args.microbatches} "
        f"microbatches, chunks of {args.chunk}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, torch "
        f"{torch.__version__}\n"
    )
    for side in sides.values():
        side.steps(2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(sides[name].steps(args.steps))
    print(
        "| state | step ms | relative to the device | CPU ms per step | device MiB | host MiB "
        "|\n|---|---|---|---|---|---|"
    )
    base = times[names[0]]
    for name, side in sides.items():
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(times[name], base, strict=True))
        step, work = (1e3 * statistics.median(column) for column in zip(*times[name], strict=True))
        near, away = side.optimizer.device_bytes / MIB, side.optimizer.host_bytes / MIB
        print(f"| {name} | {step:.0f} | {ratio:.2f} | {work:.0f} | {near:.1f} | {away:.1f} |")


if __name__ == "__main__":
    main()
