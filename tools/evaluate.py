"""Perplexity of a saved model on text, and its scores on tasks of lm-evaluation-harness. See docs/evaluation.md.

python tools/evaluate.py --load DIR --text book.txt
python tools/evaluate.py --load-hf models/Llama-3.2-1B --text book.txt
python tools/evaluate.py --load DIR --jsonl held_out/*.jsonl --json-key text
torchrun --nproc-per-node 2 tools/evaluate.py --load DIR --tasks mine --include-path tasks/
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.base.errors import ConfigError, DataError
from megatron.base.launch import launch_environment
from megatron.command_line.exits import check_output
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.interval import SIZE, SIZE_OR_NONE
from megatron.core.comm.collectives import barrier
from megatron.core.datasets.jsonl import parse_texts, read_blocks
from megatron.core.datasets.tokenizer import beginning
from megatron.core.groups import disconnect
from megatron.core.inference.score import TextScore, score_texts
from megatron.tooling.tool import add_model_flags, context_length, end, open_model, read_model, run_tool

# limit over text for models that allow more: a window's cost grows quadratically with its length
DEFAULT_CONTEXT = 4096


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--text", nargs="+", type=path_word, default=[], metavar="FILE", help="text files, one document per file")
    add(
        "--jsonl",
        nargs="+",
        type=path_word,
        default=[],
        metavar="FILE",
        help=".jsonl or .jsonl.gz files, one document per line",
    )
    add("--json-key", default="text", metavar="NAME", help="key of the text in each line (default text)")
    add("--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness")
    add("--include-path", type=path_word, metavar="DIR", help="folder with tasks of your own (YAML)")
    add(
        "--num-fewshot",
        type=within(int, SIZE_OR_NONE),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    add("--limit", type=within(int, SIZE), metavar="N", help="questions per task (default: all)")
    add(
        "--context-length",
        type=within(int, SIZE),
        metavar="N",
        help=f"longest input (default: the model's limit; over --text and --jsonl at most {DEFAULT_CONTEXT})",
    )
    add(
        "--stride",
        type=within(int, SIZE),
        metavar="N",
        help="tokens between windows over a document (default: half the context)",
    )
    add(
        "--batch-tokens",
        type=within(int, SIZE),
        default=16384,
        metavar="N",
        help="positions read together (default 16384)",
    )
    add("--add-bos", action="store_true", help="begin the tasks' prompts with the tokenizer's bos")
    add("--output", type=path_word, metavar="FILE", help="write the results as JSON, too")
    return parser


def evaluate(args: argparse.Namespace) -> None:
    """Evaluates texts, then tasks. Collective over the world; the first rank prints."""
    if not (args.text or args.jsonl or args.tasks):
        raise ConfigError("there is nothing to evaluate on; give --text, --jsonl or --tasks")
    for flag, value in (
        ("--include-path", args.include_path),
        ("--num-fewshot", args.num_fewshot),
        ("--limit", args.limit),
    ):
        if value is not None and not args.tasks:
            raise ConfigError(f"{flag} has no effect without --tasks; remove it")
    if args.stride is not None and not (args.text or args.jsonl):
        raise ConfigError("--stride has no effect without --text or --jsonl; remove it")
    inputs = {
        f"{flag} {path}": path for flag, paths in (("--text", args.text), ("--jsonl", args.jsonl)) for path in paths
    }
    check_output("--output", args.output, inputs)
    harness = import_harness() if args.tasks else None
    for flag, paths in (("--text", args.text), ("--jsonl", args.jsonl)):
        for path in paths:
            if not os.path.isfile(path):
                raise DataError(f"{flag} {path} is not a file")
    files = [(path, read_text(path)) for path in args.text]
    files += [(path, read_lines(path, args.json_key)) for path in args.jsonl]
    saved, tokenizer = read_model(args)
    beginning(tokenizer, args.add_bos)  # raises for a tokenizer without a bos
    context = context_length(saved, args.context_length, "--context-length", DEFAULT_CONTEXT)
    task_context = context_length(saved, args.context_length, "--context-length") if args.tasks else 0
    stride = (context + 1) // 2 if args.stride is None else args.stride
    if not 0 < stride <= context:
        raise ConfigError(f"--stride {stride} must be at least 1 and at most the context of {context} tokens")

    model, build = open_model(saved, args, timeout_minutes=30.0)
    results: dict[str, Any] = {}
    speaks = launch_environment()[0] == 0
    with build.groups.heartbeat.phase("evaluate"):
        scores: dict[str, TextScore] = {}
        for path, texts in files:
            scores[path] = score_texts(
                model, build, tokenizer, texts, context=context, stride=stride, batch_tokens=args.batch_tokens
            )
        if scores and speaks:
            print_scores(scores, context, stride)
            results["texts"] = {path: as_json(score) for path, score in scores.items()}
        if harness is not None:
            lm = harness.CheckpointLM(
                model, build, tokenizer, context=task_context, batch_tokens=args.batch_tokens, add_bos=args.add_bos
            )
            tasks = harness.run_tasks(lm, args.tasks.split(","), args.include_path, args.num_fewshot, args.limit)
            if speaks:
                print(harness.format_table(tasks))
                results["tasks"] = tasks["results"]
    if args.output and speaks:
        write_json(args.output, results)
    barrier(build.groups.world)
    disconnect(build.groups.heartbeat)


def import_harness() -> ModuleType:
    """Returns the module that uses lm_eval, an extra that is imported only on request. Raises ConfigError."""
    try:
        return importlib.import_module("megatron.core.inference.harness")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tasks needs {error.name}; pip install 'megatron-patched[eval]'") from error


def read_text(path: str) -> Iterator[str]:
    """Yields the file as one document. Raises DataError."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            yield file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {path} cannot be read: {error}; give a UTF-8 text file") from error


def read_lines(path: str, key: str) -> Iterator[str]:
    """Yields one document per line, or several if the key holds a list. Raises DataError."""
    number = 0
    for block in read_blocks(path):
        for line in block.lines():
            number += 1
            if not line.strip():
                continue
            try:
                (texts,) = parse_texts(line, [key])
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from error
            yield from texts


def print_scores(scores: dict[str, TextScore], context: int, stride: int) -> None:
    """Prints one row per file, and one for all of them."""
    table = Table(title=f"context {context}, stride {stride}", box=SIMPLE)
    table.add_column("file")
    for name in ("documents", "tokens", "bytes", "nats/token", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    rows = list(scores.items())
    if len(rows) > 1:
        rows.append(("all", total(list(scores.values()))))
    for name, score in rows:
        counts = (f"{count:,}" for count in (score.documents, score.tokens, score.bytes))
        table.add_row(name, *counts, f"{score.loss:.4f}", f"{score.perplexity:.3f}", f"{score.bits_per_byte:.4f}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)


def total(scores: Sequence[TextScore]) -> TextScore:
    """Sums over tokens and bytes, not means over files."""
    return TextScore(
        sum(score.documents for score in scores),
        sum(score.tokens for score in scores),
        sum(score.bytes for score in scores),
        sum(score.nats for score in scores),
    )


def as_json(score: TextScore) -> dict[str, float]:
    """Returns counts and rates."""
    return {
        "documents": score.documents,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "nats_per_token": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def write_json(path: str, results: dict[str, Any]) -> None:
    """Writes results to a file. Raises ConfigError."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2, default=str)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}; give another file") from error


if __name__ == "__main__":
    if code := run_tool(build_parser(), evaluate, sys.argv[1:]):
        end(code)
