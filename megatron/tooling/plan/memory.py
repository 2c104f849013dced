"""tools/plan.py memory: prints the memory of each pipeline rank of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.base.errors import ConfigError
from megatron.command_line.flag_parser import within
from megatron.config.interval import AT_LEAST_ONE, RANKS
from megatron.planner.memory.plan import plan_memory
from megatron.planner.memory.table import MIB, memory_headline, notes, table_rows
from megatron.spec.expert_rows import WORST
from megatron.tooling.plan.run import settings_of, target_of

TABLE_RANKS = 8  # columns of a table of memory


def add_memory_command(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `memory` other than the run's own."""
    parser.add_argument(
        "--world-size",
        type=within(int, RANKS),
        metavar="N",
        help="processes of the run; default the fewest of this layout",
    )
    parser.add_argument(
        "--cpu-multiplies-halves",
        action="store_true",
        help="with --device cpu: it has instructions for bf16 and fp16, so that no fp32 copies are made",
    )
    parser.add_argument(
        "--moe-load-imbalance",
        type=within(float, AT_LEAST_ONE),
        metavar="X",
        help="load of the experts of the fullest rank in units of the mean (default 1)",
    )
    parser.set_defaults(work=plan_run_memory)


def plan_run_memory(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the memory of each pipeline rank. Raises UserErrors, also for flags that the run would reject."""
    run, settings = settings_of(flags, args.world_size, description="Memory of the run with these flags.")
    target = target_of(run, multiplies_halves=args.cpu_multiplies_halves)
    flag_imbalance = args.moe_load_imbalance
    if flag_imbalance is not None and not any(run.model.moe_layers):
        raise ConfigError(f"--moe-load-imbalance {flag_imbalance:g} has no effect: no layer has experts; remove it")
    imbalance = flag_imbalance or 1.0
    ranks = plan_memory(run, settings, target, imbalance)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    for first in range(0, len(ranks), TABLE_RANKS):
        shown = ranks[first : first + TABLE_RANKS]
        table = Table(box=SIMPLE, pad_edge=False)
        table.add_column("MiB of pipeline rank")
        for rank in shown:
            table.add_column(str(rank.rank), justify="right")
        for row in table_rows(shown):
            table.add_row(*row)
        console.print(table)
    console.print(memory_headline(settings, run.model.dtype_name, target))
    for note in notes(run.recompute, run.activation_offload, settings.optimizer_offload):
        console.print(note, soft_wrap=True)
    for rank in ranks:
        console.print(f"rank {rank.rank}: most, {rank.peak / MIB:.1f} MiB, at {rank.moment}", soft_wrap=True)
    if any(run.model.moe_layers):
        for load in sorted({1.0, imbalance, WORST}):
            peaks = ", ".join(f"{rank.peak / MIB:.1f}" for rank in plan_memory(run, settings, target, load))
            console.print(f"{load_name(load)}: most, in MiB of each rank, {peaks}", soft_wrap=True)


def load_name(imbalance: float) -> str:
    """Names the load of the experts of the fullest rank."""
    if imbalance == WORST:
        return "worst case, all tokens to the experts of one rank"
    return "balanced load of the experts" if imbalance == 1 else f"{imbalance:g} times the mean load of the experts"
