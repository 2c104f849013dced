"""tools/plan.py time: prints the time of a run's step on a cluster, by part."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.command_line.flag_parser import path_word, within
from megatron.config.interval import RANKS
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.plan import plan_memory
from megatron.planner.time.hardware import BF16, GB, TERA, Cluster, used_memory
from megatron.planner.time.step_time import PARTS, StepTime, model_of_run
from megatron.tooling.plan.machine import PlannedMachine, machine_of
from megatron.tooling.plan.run import settings_of, software_of, target_of

MS = 1e-3


def add_time_command(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `time` other than the run's own."""
    add = parser.add_argument
    add("--cluster", metavar="NAME|FILE", help="built-in devices such as h100:32x8, or a TOML file")
    add(
        "--profile",
        type=path_word,
        metavar="FILE",
        help="what tools/profile_machine.py measured; without --cluster its machine",
    )
    add(
        "--world-size",
        type=within(int, RANKS),
        metavar="N",
        help="processes of the run; default all devices of the cluster or the profile, or the fewest of this layout",
    )
    parser.set_defaults(work=plan_time)


def plan_time(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the time of a step. Raises UserErrors, also for flags that the run would reject."""
    machine = machine_of(args.cluster, args.profile)
    cluster, world_size = machine.cluster, args.world_size or machine.world_size
    run, settings = settings_of(flags, world_size, description="Time of the run with these flags.")
    software = software_of(run)
    clock = machine.clock(run, software)
    model = model_of_run(run, settings, cluster, software, clock)
    show(model.time(clock), machine)
    print(memory_line(run, settings, cluster))
    ratio = model.offload_ratio(clock)
    if ratio is not None:
        print(f"--pipeline-offload-ratio auto: {ratio:.2f} of the activations, the largest ratio that costs no time")


def memory_line(run: RunConfig, settings: RunSettings, cluster: Cluster) -> str:
    """Says how much memory the fullest rank needs, and whether the device has it."""
    target = target_of(run)
    fullest = max(plan_memory(run, settings, target), key=lambda rank: rank.peak)
    host = f", {fullest.host / GB:.1f} GB in host memory" if fullest.host else ""
    tensors = f"memory {fullest.peak / GB:.1f} GB of tensors on pipeline rank {fullest.rank}, the fullest{host}"
    if target.cpu:
        return tensors
    needed, has = used_memory(fullest.peak), cluster.device.memory
    verdict = "fits" if needed <= has else "does not fit"
    return f"{tensors}; with what allocator and libraries take {needed / GB:.1f} GB: {verdict} {has / GB:.1f} GB"


def show(time: StepTime, machine: PlannedMachine) -> None:
    """Prints the step's figures and a table of its parts."""
    cluster, seconds = machine.cluster, float(time.seconds)
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("part of the slowest rank", "ms", "share"):
        table.add_column(heading, justify="left" if heading[0] == "p" else "right")
    for part in PARTS:
        spent = float(time.parts.get(part, 0.0))
        if abs(spent) > 5e-4 * seconds:
            table.add_row(part, f"{spent / MS:.1f}", f"{spent / seconds:.1%}")
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    achieved = float(time.flops_per_second)
    console.print(
        f"step {seconds / MS:.1f} ms on {time.ranks} {cluster.device.name}: {float(time.tokens_per_second):.0f} "
        f"tokens/s, {achieved / TERA:.0f} TFLOP/s and {achieved / cluster.device.flops(BF16):.1%} MFU per device",
        soft_wrap=True,
    )
    console.print(machine.basis, soft_wrap=True)
    console.print(
        "MFU: model FLOPs (spec/flops.py: causal attention counted by half, no recompute) over "
        f"{machine.peak_name}, {cluster.device.flops(BF16) / TERA:.3g} TFLOP/s",
        soft_wrap=True,
    )
