"""Measures the memory and the time of activation offload on this machine, and on pipelines by simulation.

  python -m benchmarks.activation_offload
  python -m benchmarks.activation_offload --device cuda --dtype bfloat16 --layers 16 --hidden 2048 --ffn 5632 \\
    --heads 16 --kv-heads 16 --vocab 32000 --seq 4096        # about 1B parameters

On a CPU device memory and host memory are the same: the copies are real and the originals are freed, but copying takes
cores and bandwidth from compute, unlike a GPU's copy engines. Step times here show that the results are right; they do
not show the overlap on a GPU. The second table simulates schedules with the copy time as a multiple of a rank's
forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.shape import llama
from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.core.device import choose_device, synchronize
from megatron.core.groups import create_groups
from megatron.core.offload.activations import ActivationOffload, attach_to_layers
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import ByModules, ByRatio, ChosenLayers, OffloadPolicy
from megatron.core.parameter import initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.timeline import Timeline
from megatron.core.transformer.context import Build
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.kernels.choose import choose_kernels
from megatron.schedule.costs import Costs
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.simulate import simulate
from megatron.schedule.validate import chunks_on_device
from megatron.training.batch import make_batch
from megatron.training.build_model import build_gpt
from megatron.training.microbatches import Targets, tensors_of
from megatron.training.step import ForwardProgram


class Trial:
    """One offload policy on one model."""

    def __init__(self, args: argparse.Namespace, policy: OffloadPolicy, device: torch.device) -> None:
        run = RunConfig(model=llama(args))
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        kernels, rng = choose_kernels(run.model, device), RngTracker(1, groups, device)
        self.model = build_gpt(Build(run.model, groups, False, kernels, rng, device))
        initialize(local_parameters(self.model), 1)
        layers = list(self.model.decoder.layers.values())
        pool, engine = HostPool(pinned=device.type == "cuda"), CopyEngine(Streams(device, Timeline(device)))
        self.offload = ActivationOffload(policy, engine, pool, self.model, {0: args.layers}, device)
        attach_to_layers(self.offload, layers)
        if isinstance(policy, ByModules):
            policy.attach(layers)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(args.vocab, (args.samples, args.seq + 1), generator=generator).to(device)
        self.batch, self._device = make_batch(ids, -1, DataConfig()), device
        self.seconds: list[float] = []

    def step(self) -> None:
        """Runs forward and backward of one microbatch."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.offload.begin_step(frozenset(), tensors_of([self.batch], []))
        with self.offload.forward(0, 0, None):
            loss = ForwardProgram(self.model, [self.batch], [[Targets.of(self.batch)]]).forward(0, 0, None)
        self.offload.begin_backward()
        loss.backward()
        self.offload.end_step()
        synchronize(self._device)

    def timed(self) -> None:
        """Runs a step and records its time."""
        begun = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - begun)

    def peak(self) -> int:
        """Returns the peak bytes of a step above those before it."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return torch.cuda.max_memory_allocated() - before
        memory = CpuMemory()
        before = memory.allocated
        memory.reset_peak()
        self.step()
        return memory.peak - before


def by_layer(args: argparse.Namespace) -> None:
    """Compares policies on one stage without a pipeline: steps alternate, so that all have the same conditions."""
    device, moved = choose_device(args.device, 0), args.layers - RESIDENT_LAYERS
    ways: dict[str, OffloadPolicy] = {
        "none": ByRatio(0.0),
        **{f"ratio {ratio}": ByRatio(ratio) for ratio in (0.25, 0.5, 0.75, 1.0)},
        f"first {moved} of {args.layers} layers": ChosenLayers({0: range(moved)}),
        "core_attn, mlp_act": ByModules(["core_attn", "mlp_act"]),
    }
    trials = {name: Trial(args, policy, device) for name, policy in ways.items()}
    for trial in trials.values():
        trial.step()
    for _ in range(args.rounds):
        for trial in trials.values():
            trial.timed()
    gradients = {name: [p.grad for p in trial.model.parameters()] for name, trial in trials.items()}
    plain = trials["none"]
    engine = CopyEngine(Streams(device, Timeline(device)))
    out, back = measure_bandwidth(engine, HostPool(pinned=device.type == "cuda"), device)
    print(
        f"{args.layers} layers (hidden {args.hidden}, {args.heads} heads, {args.kv_heads} groups, MLP {args.ffn}), "
        f"{args.samples} x {args.seq} tokens, {args.dtype}, {device.type}, torch {torch.__version__}, {args.rounds} "
        f"steps each in turn; copies {out / 1e9:.1f} GB/s out, {back / 1e9:.1f} in\n"
    )
    print(
        "| policy | offloaded per step, MiB | host memory, MiB | step peak, MiB | median step, ms | relative to none "
        "| same bits |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, trial in trials.items():
        steps = len(trial.seconds) + 1
        same = "yes" if all(map(torch.equal, gradients[name], gradients["none"])) else "NO"
        ratio = statistics.median(trial.seconds) / statistics.median(plain.seconds)
        out_a_step = trial.offload.offloaded_bytes / steps / 2**20
        on_host, peak = trial.offload.pool.nbytes / 2**20, trial.peak() / 2**20
        median = 1e3 * statistics.median(trial.seconds)
        print(f"| {name} | {out_a_step:.1f} | {on_host:.1f} | {peak:.1f} | {median:.0f} | {ratio:.2f} | {same} |")


def by_schedule(p: int, m: int) -> None:
    """Simulates schedules with F = 1, B = 2 per rank: peak activations on the device, and the additional time."""
    print(
        f"\n{p} ranks, {m} microbatches; kept: on the device, in microbatches of all of a rank's layers (worst rank). "
        "Other"
    )
    print(
        "columns: increase of the step time over no offload, if copying all activations of a microbatch takes so long\n"
    )
    copies = (0.5, 1.0, 1.5, 2.0)
    print("| schedule | ratio | kept | " + " | ".join(f"{copy:g} F" for copy in copies) + " |")
    print("|---|---|---|" + "---|" * len(copies))
    for name, v in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("gpipe", 1), ("zb-h1", 1)):
        sent = with_transfers(SCHEDULES[name].build(p, m, v=v), overlap=True)
        moved = with_offload(sent)
        plain = simulate(sent, costs(p * v, v, 0.0)).makespan
        for ratio in (0.0, 0.5, 1.0):
            near = max(chunks_on_device(moved, ratio)) / v
            longer = [simulate(moved, costs(p * v, v, ratio * copy)).makespan / plain - 1 for copy in copies]
            label = name if v == 1 else f"{name}, v = {v}"
            print(f"| {label} | {ratio:g} | {near:g} | " + " | ".join(f"{100 * more:+.1f} %" for more in longer) + " |")


def costs(stages: int, v: int, copy: float) -> Costs:
    """Returns the costs of chunks that are 1/v of a rank's layers."""
    return Costs.uniform(stages, forward=1 / v, input_grad=1 / v, weight_grad=1 / v, offload=copy / v, reload=copy / v)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=688)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    if args.layers <= RESIDENT_LAYERS:
        parser.error(f"--layers {args.layers}: the last {RESIDENT_LAYERS} of a stage stay; give more")
    by_layer(args)
    by_schedule(8, 32)


if __name__ == "__main__":
    main()
