"""tools/plan.py time: prints the time of a run's step on a cluster, by part."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.base.errors import ConfigError
from megatron.command_line.flag_parser import path_word, within
from megatron.config.interval import RANKS
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.learning import SAMPLING
from megatron.planner.memory.plan import RankMemory, plan_memory, planned_model
from megatron.planner.memory.sampling import cache_bytes, fitting_slots, forward_sizes, samples, sampling_shape
from megatron.planner.time.hardware import BF16, GB, TERA, Cluster, requested_memory, used_memory
from megatron.planner.time.rollout import RolloutModel, RolloutTime
from megatron.planner.time.step_time import PARTS, StepTime, model_of_run
from megatron.spec.decoder import decoder_spec
from megatron.tooling.plan.machine import PlannedMachine, machine_of
from megatron.tooling.plan.responses import response_lengths
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
    add(
        "--response-lengths",
        type=path_word,
        metavar="MEAN|FILE",
        help="of a run that samples answers: the mean number of tokens of an answer, or a file of --save-rollouts, such "
        "as rollout_0000040.jsonl (default: all as long as --rollout-max-response-len)",
    )
    parser.set_defaults(work=plan_time)


def plan_time(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the time of a step. Raises UserErrors, also for flags that the run would reject."""
    machine = machine_of(args.cluster, args.profile)
    cluster, world_size = machine.cluster, args.world_size or machine.world_size
    run, settings = settings_of(flags, world_size, description="Time of the run with these flags.")
    software = software_of(run)
    clock = machine.clock(run, software)
    if args.response_lengths is not None and not samples(run):
        raise ConfigError(
            f"--response-lengths {args.response_lengths} has no effect: the run samples no answers; remove it, or add "
            "--perform-rl-step and --prompt-data"
        )
    if run.data.perform_rl_step:
        lengths = response_lengths(run, args.response_lengths) if samples(run) else []
        show_rollout(RolloutModel(run, settings, cluster, software, lengths).time(clock), lengths)
        print(memory_line(run, settings, cluster))
        return
    model = model_of_run(run, settings, cluster, software, clock)
    show(model.time(clock), machine)
    print(memory_line(run, settings, cluster))
    ratio = model.offload_ratio(clock)
    if ratio is not None:
        print(f"--pipeline-offload-ratio auto: {ratio:.2f} of the activations, the largest ratio that costs no time")


def memory_line(run: RunConfig, settings: RunSettings, cluster: Cluster) -> str:
    """Says how much memory the fullest rank needs, and whether the device has it."""
    target = target_of(run)
    ranks = plan_memory(run, settings, target)
    fullest = max(ranks, key=lambda rank: rank.peak)
    host = f", {fullest.host / GB:.1f} GB in host memory" if fullest.host else ""
    tensors = f"memory {fullest.peak / GB:.1f} GB of tensors on pipeline rank {fullest.rank}, the fullest{host}"
    if target.cpu:
        return tensors
    needed, has = used_memory(fullest.peak), cluster.device.memory
    verdict = "fits" if needed <= has else "does not fit"
    line = f"{tensors}; with what allocator and libraries take {needed / GB:.1f} GB: {verdict} {has / GB:.1f} GB"
    return line if needed <= has or not samples(run) else f"{line}\n{smaller_cache(run, settings, ranks, has)}"


def smaller_cache(run: RunConfig, settings: RunSettings, ranks: Sequence[RankMemory], has: float) -> str:
    """Says which --rl-generation-batch-size fits a device with so many bytes of memory, if the cache does not."""
    free, shape = requested_memory(has), sampling_shape(run, settings)
    of_sampling = max(used_memory(phase.peak) for rank in ranks for phase in rank.phases if phase.name == SAMPLING)
    if of_sampling <= has:
        return "sampling fits, and the training step does not"
    room = [free - rank.start for rank in ranks]
    stages = [stage for rank in ranks for stage in rank.stages]
    spec, target = decoder_spec(planned_model(run)), target_of(run)
    cache = max(cache_bytes(spec, stage, forward_sizes(run, settings, target, s=1, b=1), shape) for stage in stages)
    slots = fitting_slots(spec, stages, run, settings, target, room)
    fix = (
        f"give --rl-generation-batch-size {slots} or less"
        if slots
        else "give a smaller model, or more ranks of tp or pp"
    )
    return (
        f"sampling needs {of_sampling / GB:.1f} GB, of which the cache of {shape.slots} answers of {shape.capacity} tokens "
        f"takes {cache / GB:.1f} GB; {fix}"
    )


def show_rollout(time: RolloutTime, lengths: Sequence[int]) -> None:
    """Prints the phases of a step of train_rl.py, and the batch of the answers."""
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("phase of a step", "s", "share"):
        table.add_column(heading, justify="left" if heading[0] == "p" else "right")
    for phase, seconds in time.phases.items():
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / time.seconds:.1%}")
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    batch = time.batching
    if batch is None:
        print(f"step {time.seconds:.2f} s")
        return
    print(
        f"step {time.seconds:.2f} s for {len(lengths)} answers of {sum(lengths) / len(lengths):.0f} tokens on average, the "
        f"longest {max(lengths)}: {batch.steps} decoding steps of {batch.mean_rows:.0f} answers on average, of which "
        f"{batch.steps_of_tail} run less than half of the largest batch"
    )
    print("not included: rewards, and decoding steps that the engine's own work in Python limits")


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
