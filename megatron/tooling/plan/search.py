"""tools/plan.py search: finds the fastest layouts of a run on a cluster."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.base.errors import ConfigError
from megatron.command_line.exits import check_output
from megatron.command_line.flag_parser import path_word, within
from megatron.command_line.read import parse
from megatron.config.interval import BELOW_HUNDRED, COUNT, POSITIVE, RANKS
from megatron.planner.search.explain import compare, explain
from megatron.planner.search.flags import command_of, flags_of
from megatron.planner.search.layout import Layout, fixed_choices
from megatron.planner.search.narrow import parse_space
from megatron.planner.search.nothing import space_with
from megatron.planner.search.search import FREE_MEMORY, Planner, SearchResult, search
from megatron.planner.time.hardware import BF16, TERA
from megatron.tooling.plan.explain import comparison_lines, print_explanation
from megatron.tooling.plan.front import front_of
from megatron.tooling.plan.front_page import write_front_page
from megatron.tooling.plan.front_plot import draw_front
from megatron.tooling.plan.layouts import print_bars, print_trial, table_of
from megatron.tooling.plan.machine import machine_of
from megatron.tooling.plan.nothing import none_fits, none_is_accepted
from megatron.tooling.plan.request import SearchRequest, request_of
from megatron.tooling.plan.run import with_vocabulary
from megatron.tooling.plan.search_json import SearchAnswer, as_object
from megatron.tooling.plan.try_runs import try_layouts

PERCENT = 0.01


def add_search_command(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `search` other than the run's own."""
    add = parser.add_argument
    add("--cluster", metavar="NAME|FILE", help="built-in devices such as h100:32x8, or a TOML file")
    add("--profile", type=path_word, metavar="FILE", help="times of the machine, measured by tools/profile_machine.py")
    add("--world-size", type=within(int, RANKS), metavar="N", help="processes; default all devices of the cluster")
    add("--space", default="", metavar="TEXT", help="values to try, as in 'tp=1,2 recompute=none,full'")
    add("--top", type=within(int, COUNT), default=5, metavar="N", help="layouts to print (default 5)")
    add(
        "--free-memory",
        type=within(float, BELOW_HUNDRED),
        default=100 * FREE_MEMORY,
        metavar="PERCENT",
        help="of a device's memory, which a layout leaves free (default %(default)g)",
    )
    add("--train-tokens", type=within(float, POSITIVE), metavar="X", help="tokens of the whole training, for its days")
    add("--explain", type=within(int, COUNT), metavar="N", help="say why the N-th layout takes its time")
    add("--compare", type=path_word, metavar="FLAGS", help="say why the layout of these flags is not the first one")
    add(
        "--try", dest="tried", type=within(int, COUNT), metavar="K", help="run the first K layouts here, and rank again"
    )
    add("--front", type=path_word, metavar="FILE", help="picture of throughput against memory: a .png or .html file")
    add("--json", type=path_word, metavar="FILE", help="write everything as one object; - prints it and nothing else")
    parser.set_defaults(work=plan_search)


def plan_search(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the fastest layouts. Raises UserErrors, also if there is none."""
    check_files(args)
    request = request_of(
        flags, machine_of(args.cluster, args.profile), args.world_size, args.train_tokens, PERCENT * args.free_memory
    )
    if request.run.parallel.overlap_moe_expert_parallel_comm:
        raise ConfigError(
            "--overlap-moe-expert-parallel-comm is not searched; leave it out, and compare the layouts that the search "
            "shows with and without it by tools/plan.py time and memory"
        )
    if args.tried is not None and request.world_size > request.cluster.node:
        raise ConfigError(
            f"--try {args.tried} runs layouts on this host, and {request.world_size} ranks take "
            f"{-(-request.world_size // request.cluster.node)} nodes; leave it out, or search for one node"
        )
    chosen = {**fixed_choices(request.run), **parse_space(args.space)}
    candidates = space_with(request.run, request.world_size, chosen)
    if not len(candidates):
        raise none_is_accepted(request, chosen)
    planner = request.planner(request.world_size)
    result = search(planner, candidates, args.top)
    if not result.best:
        raise none_fits(request, chosen, result)
    answer = answer_of(args, request, planner, result)
    if args.json is not None:
        text = json.dumps(as_object(request, result, answer, planner.limit), indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.json != "-":
        print_answer(request, result, answer, planner.limit)
    if args.front is not None:
        write = write_front_page if args.front.endswith(".html") else draw_front
        write(Path(args.front), front_of(request, planner, result))
    if args.json != "-":
        for file in filter(None, (args.json, args.front)):
            print(f"{file} written")


def check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError for files that cannot be written."""
    if args.front is not None and Path(args.front).suffix not in (".png", ".html"):
        raise ConfigError(f"--front {args.front} is neither a .png nor a .html file; end its name in one of them")
    inputs = {"--profile": args.profile, "--cluster": args.cluster}
    check_output("--front", args.front, inputs)
    check_output("--json", None if args.json == "-" else args.json, {**inputs, "--front": args.front})


def answer_of(args: argparse.Namespace, request: SearchRequest, planner: Planner, result: SearchResult) -> SearchAnswer:
    """Returns the answers to what was asked besides the layouts. Raises UserErrors."""
    number = args.explain
    if number is not None and number > len(result.best):
        raise ConfigError(
            f"--explain {number}: {len(result.best)} layouts are printed; give one of them, or raise --top"
        )
    compared = None
    if args.compare is not None:
        try:
            words = shlex.split(args.compare)
        except ValueError as error:
            raise ConfigError(f"--compare {args.compare}: {error}; close it") from None
        compared_run = parse([*request.flags, *request.added, *words], description="The layout of these flags.")
        compared = compare(planner, with_vocabulary(compared_run))
    trial = None
    if args.tried is not None:
        layout_words = [words_of(request, planned.layout) for planned in result.best]
        trial = try_layouts(layout_words, [planned.seconds for planned in result.best], args.tried, request.world_size)
        number = number or trial.corrected.order[0] + 1
    return SearchAnswer(
        number or 1,
        None if args.explain is None else explain(planner, result, args.explain - 1),
        compared,
        trial,
        tuple(command(request, planned.layout) for planned in result.best),
    )


def words_of(request: SearchRequest, layout: Layout) -> list[str]:
    """Returns the flags of the run in a layout."""
    return [*request.words, *flags_of(layout, request.run)]


def command(request: SearchRequest, layout: Layout) -> str:
    """Returns the command that starts the run in a layout."""
    return command_of(words_of(request, layout), request.world_size, min(request.world_size, request.cluster.node))


def print_answer(request: SearchRequest, result: SearchResult, answer: SearchAnswer, limit: float) -> None:
    """Prints the table, the bars, how they were found, the explanations, and a command."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(
        table_of(result.best, request.cluster, limit, tokens=request.tokens, errors=request.machine.profile is None)
    )
    print_bars(console, result.best)
    console.print()
    for line in (*count_lines(request, result), *note_lines(request, result)):
        console.print(line, soft_wrap=True)
    if answer.explanation is not None:
        planned = result.best[answer.number - 1]
        console.print(f"\nWhy layout {answer.number} takes {float(planned.time.seconds):.2f} s:")
        print_explanation(console, planned.layout, answer.explanation, float(planned.time.seconds))
    if answer.comparison is not None:
        console.print()
        for line in comparison_lines(answer.comparison, result.best[0], limit):
            console.print(line, soft_wrap=True)
    if answer.trial is not None:
        print_trial(console, answer.trial)
    hint = f"; --explain N prints that of layout N, of 1 to {len(result.best)}" if len(result.best) > 1 else ""
    console.print(f"\nThe command of layout {answer.number}{hint}:\n", soft_wrap=True)
    console.print(answer.commands[answer.number - 1], soft_wrap=True, markup=False)
    if request.added:
        console.print(
            f"\n{' '.join(request.added)} stand for flags that a run needs and that were not given: replace them by "
            "your own",
            soft_wrap=True,
        )


def error_words(request: SearchRequest, result: SearchResult) -> str:
    """Returns the errors of the layouts, in percent of the step, and the published runs behind them."""
    kind = "of published runs with experts" if any(request.run.model.moe_layers) else "that median"
    percents = sorted({round(planned.error / PERCENT, 1) for planned in result.best})
    ends = dict.fromkeys(f"{percent:g}" for percent in (percents[0], percents[-1]))
    return f"{kind}, {' to '.join(ends)} %"


def count_lines(request: SearchRequest, result: SearchResult) -> list[str]:
    """Returns how the layouts were found."""
    return [
        f"{len(result.candidates):,} layouts on {request.world_size} {request.cluster.device.name}: "
        f"{result.bounded_out:,} cannot be among the first, or the first of their mesh, by the lower bound of their "
        f"time, {result.out_of_memory:,} of the others need too much memory, {result.simulated:,} were simulated; "
        f"{result.seconds:.1f} s"
    ]


def note_lines(request: SearchRequest, result: SearchResult) -> list[str]:
    """Returns what the figures mean, and how far to trust them."""
    machine = request.machine
    lines = [
        machine.basis,
        "MFU: model FLOPs (spec/flops.py: causal attention counted by half, no recompute) over "
        f"{machine.peak_name}, {request.cluster.device.flops(BF16) / TERA:.3g} TFLOP/s",
    ]
    if machine.profile is None:
        lines.insert(
            1, f"±: {error_words(request, result)} of the step; an error that all layouts share leaves their order"
        )
    if any(planned.penalty for planned in result.best):
        lines.append(
            "layouts with ZeRO-3 over many nodes or with copies to the host, which published runs do not confirm, rank "
            "as if they took longer by the whole error of their prediction"
        )
    return lines
