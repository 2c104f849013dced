"""tools/plan.py schedule: draws a pipeline schedule, and prints its time and idle fraction."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.base.errors import ConfigError
from megatron.command_line.exits import check_output
from megatron.command_line.flag_parser import path_word, within
from megatron.config.interval import COUNT, FRACTION, LAYERS, NOT_NEGATIVE, POSITIVE, between
from megatron.planner.schedule.plot import draw, write_trace
from megatron.planner.schedule.report import report
from megatron.schedule.costs import Costs
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES, schedule_or_default
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.simulate import SimulatedTimeline, simulate
from megatron.schedule.spec import Formula, Times
from megatron.schedule.validate import chunks_on_device

EXCHANGES = 4  # parts of --exchange-time
MS = 1e-3
PLAYED, MOST_ACTIONS = between(1, 100_000), 200_000  # a schedule is simulated action by action, about 20,000 per second


def add_schedule_command(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `schedule`, with the names of training if it has them."""
    add = parser.add_argument
    add(
        "--pipeline-model-parallel-size",
        type=within(int, PLAYED),
        required=True,
        metavar="P",
        help="ranks of the pipeline",
    )
    add(
        "--num-microbatches",
        type=within(int, PLAYED),
        required=True,
        metavar="M",
        help="microbatches per step and data-parallel rank",
    )
    add("--schedule", choices=tuple(SCHEDULES), help="default: interleaved with virtual stages, else 1f1b")
    add(
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual",
        type=within(int, LAYERS),
        metavar="V",
        help="chunks of layers per rank, where the schedule leaves the choice",
    )
    add("--num-layers", type=within(int, LAYERS), metavar="N", help="layers, with the next flag")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=within(int, LAYERS),
        metavar="N",
        help="instead of the number of virtual stages",
    )
    add(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=within(int, COUNT),
        metavar="N",
        help="of interleaved: microbatches that go through one chunk before the next (default P)",
    )
    add("--forward-only", action="store_true", help="evaluation")
    add(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="backwards run together with forwards of other microbatches, and hide exchanges of tokens",
    )
    _add_times(parser)
    add("--no-overlap-p2p-communication", action="store_true", help="receives are posted where the data is needed")
    add(
        "--blocking-transfers",
        action="store_true",
        help="both ranks wait during a transfer; never overlapped",
    )
    add("--png", type=path_word, metavar="FILE", help="picture to write")
    add("--trace", type=path_word, metavar="FILE", help="Chrome trace to write, for https://ui.perfetto.dev")
    parser.set_defaults(work=plan_schedule)


def _add_times(parser: argparse.ArgumentParser) -> None:
    """Adds the flags with times of a microbatch: of its computations, its messages and its copies."""
    add = parser.add_argument
    add(
        "--forward-time",
        type=within(float, POSITIVE),
        default=1.0,
        metavar="MS",
        help="time of a microbatch's forward through a rank's layers (default 1)",
    )
    add(
        "--input-grad-time",
        type=within(float, POSITIVE),
        metavar="MS",
        help="time of its backward for the input (default: as forward)",
    )
    add(
        "--weight-grad-time",
        type=within(float, POSITIVE),
        metavar="MS",
        help="time of its backward for the weights (default: as forward)",
    )
    add(
        "--transfer-time",
        type=within(float, NOT_NEGATIVE),
        default=0.0,
        metavar="MS",
        help="activations from rank to rank (default 0)",
    )
    add(
        "--latency",
        type=within(float, NOT_NEGATIVE),
        default=0.0,
        metavar="MS",
        help="until they arrive after that (default 0)",
    )
    add(
        "--exchange-time",
        type=within(float, NOT_NEGATIVE),
        default=0.0,
        metavar="MS",
        help="exchanges of tokens in the forward, and again in the backward, of a microbatch through a rank's layers, "
        "in four parts (default 0)",
    )
    add(
        "--offload-ratio",
        type=within(float, FRACTION),
        default=0.0,
        metavar="X",
        help="share of the activations to offload (default 0)",
    )
    add(
        "--copy-time",
        type=within(float, NOT_NEGATIVE),
        default=0.0,
        metavar="MS",
        help="time to copy all activations of a microbatch in one direction (default 0)",
    )


def plan_schedule(args: argparse.Namespace, unread: Sequence[str]) -> None:
    """Simulates the schedule; prints, draws and writes the result. Raises UserErrors."""
    if unread:
        raise ConfigError(f"unrecognized arguments: {' '.join(unread)}; python tools/plan.py schedule --help lists all")
    check_numbers(args)
    check_output("--png", args.png)
    check_output("--trace", args.trace)
    p, m = args.pipeline_model_parallel_size, args.num_microbatches
    virtual = virtual_stages(args)
    group = args.microbatch_group_size_per_virtual_pipeline_stage
    spec = schedule_or_default(args.schedule, virtual)
    sizes = spec.sizes(p, m, virtual, group, pairs=args.overlap_moe_expert_parallel_comm)
    late = args.no_overlap_p2p_communication or args.blocking_transfers
    if sizes.pairs and (args.forward_only or late or not spec.has_pairs):
        raise ConfigError(
            "--overlap-moe-expert-parallel-comm needs backwards next to forwards, and messages that are overlapped; "
            "remove it, or --forward-only, --no-overlap-p2p-communication, --blocking-transfers and --schedule gpipe"
        )
    schedule = spec.schedule(sizes)
    formula = None
    if args.forward_only:
        schedule = forward_only(schedule)
    else:
        formula = spec.bubble(sizes, Times(args.forward_time, args.input_grad_time, args.weight_grad_time))
    schedule = with_transfers(schedule, overlap=not late)
    if args.offload_ratio > 0:
        schedule = with_offload(schedule)
    timeline = simulate(
        schedule,
        costs_of(args, sizes.v),
        blocking=args.blocking_transfers,
        exchanges=EXCHANGES if args.exchange_time else 0,
    )
    print_report(timeline, formula)
    if args.offload_ratio > 0:
        held = ", ".join(f"{chunks:g}" for chunks in chunks_on_device(schedule, args.offload_ratio))
        print(f"with {args.offload_ratio:.0%} offloaded, kept on the device by rank, in chunks: {held}")
    write_files(args, timeline)


def check_numbers(args: argparse.Namespace) -> None:
    """Fills in omitted times. Raises ConfigError for incompatible numbers."""
    for flag in ("input_grad_time", "weight_grad_time"):
        if vars(args)[flag] is None:
            setattr(args, flag, args.forward_time)
    actions = args.pipeline_model_parallel_size * args.num_microbatches * (virtual_stages(args) or 1)
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} x --num-microbatches "
            f"{args.num_microbatches} and virtual stages make {actions} actions to play, more than {MOST_ACTIONS}; "
            "plan fewer microbatches, which repeat themselves"
        )
    if args.copy_time and not args.offload_ratio:
        raise ConfigError(f"--copy-time {args.copy_time:g} has no effect without --offload-ratio; give it")


def virtual_stages(args: argparse.Namespace) -> int | None:
    """Returns the requested number of chunks per rank. Raises ConfigError if the layers do not divide into them."""
    layers, a_stage = args.num_layers, args.num_layers_per_virtual_pipeline_stage
    virtual, p = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    if a_stage is None:
        if layers is not None:
            raise ConfigError("--num-layers has no effect without --num-layers-per-virtual-pipeline-stage; remove it")
        return virtual
    if virtual is not None:
        raise ConfigError(
            "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage set the same; remove "
            "one"
        )
    if layers is None:
        raise ConfigError("--num-layers-per-virtual-pipeline-stage needs --num-layers; give it")
    if layers % (p * a_stage):
        raise ConfigError(
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {p} x "
            f"--num-layers-per-virtual-pipeline-stage {a_stage}; change one of them"
        )
    return layers // (p * a_stage)


def costs_of(args: argparse.Namespace, v: int) -> Costs:
    """Returns costs in seconds; a chunk takes its fraction of the rank's time."""
    return Costs.uniform(
        v * args.pipeline_model_parallel_size,
        forward=args.forward_time * MS / v,
        input_grad=args.input_grad_time * MS / v,
        weight_grad=args.weight_grad_time * MS / v,
        transfer=args.transfer_time * MS,
        offload=args.offload_ratio * args.copy_time * MS / v,
        reload=args.offload_ratio * args.copy_time * MS / v,
        latency=args.latency * MS,
        forward_exchange=args.exchange_time * MS / v,
        backward_exchange=args.exchange_time * MS / v,
    )


def print_report(timeline: SimulatedTimeline, formula: Formula | None) -> None:
    """Prints a line for the step, and one row per rank."""
    rows = report(timeline)
    table = Table(title=headline(timeline), title_justify="left", title_style="", box=SIMPLE)
    for heading in (
        "rank",
        "stages",
        "compute ms",
        "idle",
        "idle inside",
        "exposed ms",
        "kept: chunks",
        "microbatches",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.rank),
            ", ".join(map(str, row.stages)),
            f"{row.busy / MS:.3f}",
            f"{row.bubble:.2%}",
            f"{row.idle_inside:.2%}",
            f"{row.exposed / MS:.3f}",
            str(row.chunks),
            f"{row.microbatches:g}",
        )
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    if formula is not None:
        console.print(f"without communication: idle {formula.text} = {formula.value:.2%} of the step")


def headline(timeline: SimulatedTimeline) -> str:
    """Formats name, sizes, time and bubble."""
    schedule = timeline.schedule
    ranks, stages = schedule.placement.num_ranks, schedule.placement.num_stages
    sizes = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if stages > ranks:
        sizes += f" x {stages // ranks} stages"
    bubble = sum(timeline.bubble(rank) for rank in range(ranks)) / ranks
    time = f"{timeline.makespan / MS:g} ms, bubble {bubble:.1%}"
    return f"{schedule.name}: {sizes}, {schedule.num_microbatches} microbatches, {time}"


def write_files(args: argparse.Namespace, timeline: SimulatedTimeline) -> None:
    """Writes the requested files."""
    if args.png is not None:
        draw(Path(args.png), timeline, headline(timeline))
    if args.trace is not None:
        write_trace(Path(args.trace), timeline)
    for file in filter(None, (args.png, args.trace)):
        print(f"{file} written")
