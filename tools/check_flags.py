"""Explains the effect of every flag of a Megatron-LM command line here, and prints the equivalent command.

  python tools/check_flags.py -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
  python tools/check_flags.py -- examples/llama/train_llama3_8b.sh
  python tools/check_flags.py --lines lines.jsonl > verdicts.jsonl

Nothing is started. Run this first when moving from Megatron-LM or one of its forks; see docs/migrating.md. A script is
read, not run. The name of the program counts, too: pretrain_bert.py is refused, and finetune.py stays finetune.py. Each
line of a file for --lines is a JSON object with `argv`, the flags of the training script, `world`, its number of
processes or null, and perhaps `program`, its path; a verdict repeats the other fields of the line. Exit code 0: every
command is accepted; 1: something is rejected; 2: the input cannot be read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.read_file import parse_json
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_check import Verdict, check_command
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.flag_table import ALIAS, NOOP, READ, SAME
from megatron.config.interval import SIZE
from megatron.tooling.launch_script.commands import Command, read_launch

WIDTH = 120
_SAID = {READ: "read", ALIAS: "another name here", SAME: "already in effect", NOOP: "no effect on the results"}


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [flags] -- COMMAND | SCRIPT",
    )
    parser.add_argument(
        "--world-size",
        type=within(int, SIZE),
        metavar="N",
        help="number of processes, if the command does not contain it",
    )
    parser.add_argument("--lines", type=path_word, metavar="FILE.jsonl", help="check each line of this file instead")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the tool; see the head of this file."""
    before, _, command = _cut(argv)
    return exit_code(lambda: run(build_parser().parse_args(before), command))


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Checks a command, a script or a file of command lines. Raises ConfigError for input that cannot be read."""
    if args.lines and command:
        raise ConfigError(f"--lines {args.lines} and a command are given together; give one of them")
    if args.lines:
        return _check_lines(Path(args.lines), args.world_size)
    if not command:
        raise ConfigError("there is nothing to check; give a command line or a launch script after --")
    commands = read_launch(command)
    if not commands:
        raise ConfigError(f"{command[0]} starts no known training script; give its flags themselves after --")
    verdicts = [check_command(launch.argv, args.world_size or launch.world, launch.program) for launch in commands]
    print("\n\n".join(report(launch, verdict) for launch, verdict in zip(commands, verdicts, strict=True)))
    return 0 if all(verdict.accepted for verdict in verdicts) else 1


def report(command: Command, verdict: Verdict) -> str:
    """Formats the effect of each flag, the rejected flags, and the equivalent command."""
    counts = Counter(outcome.kind for outcome in verdict.outcomes)
    summary = ", ".join(f"{counts[kind]} {said}" for kind, said in _SAID.items() if counts[kind])
    lines = [
        f"{len(verdict.outcomes)} flags of {command.program or 'the command'} on {verdict.world_size} processes: "
        f"{summary}"
    ]
    rows = [
        (str(o.typed), " ".join(o.meant) if o.kind == ALIAS else o.in_effect, o.why)
        for o in verdict.outcomes
        if o.kind in (ALIAS, NOOP)
    ]
    if rows:
        widths = [min(50, max(len(row[column]) for row in rows)) for column in (0, 1)]
        lines += [
            "",
            *(f"  {typed:<{widths[0]}}  {effect:<{widths[1]}}  {why}".rstrip() for typed, effect, why in rows),
        ]
    if already := [str(o.typed) for o in verdict.outcomes if o.kind == SAME]:
        lines += ["", *_wrapped("already in effect: " + ", ".join(already))]
    if command.unresolved:
        lines += ["", *_wrapped("unknown from the script alone: " + ", ".join(command.unresolved))]
    if verdict.unknown:
        lines += ["", *_wrapped("not checked, because the value is unknown: " + ", ".join(verdict.unknown))]
    if command.assumed:
        lines += [
            "",
            *_wrapped("assumed, because the script does not determine it: " + ", ".join(command.assumed)),
        ]
    if verdict.problems:
        lines += [
            "",
            f"refused, {len(verdict.problems)} problems:",
            *(f"  {problem}" for problem, _ in verdict.problems),
        ]
        return "\n".join(lines)
    program = "finetune.py" if "--sft" in verdict.words else "pretrain_gpt.py"
    flags = [word for word in verdict.words if word != "--sft"]
    lines += ["", "the equivalent command here:", *_command(verdict.world_size, program, flags)]
    return "\n".join(lines)


def _check_lines(path: Path, world_size: int | None) -> int:
    """Prints a JSON verdict for each line of a file, and the total to stderr."""
    accepted = total = 0
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line: dict[str, Any] = parse_json(text)
            argv, world = [str(word) for word in line.pop("argv")], line.pop("world", None)
            program = line.get("program")
            if not (world is None or (isinstance(world, int) and world >= 1)) or not isinstance(program, str | None):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{path}:{number} is not a JSON object with a list argv, a number world and a text program; correct it"
            ) from None
        verdict = check_command(argv, world_size or world, program)
        refused = [{"flags": list(flags), "why": why} for why, flags in verdict.problems]
        print(json.dumps({**line, "world": verdict.world_size, "accepted": verdict.accepted, "refused": refused}))
        accepted, total = accepted + verdict.accepted, total + 1
    print(f"{accepted} of {total} lines are accepted", file=sys.stderr)
    return 0 if accepted == total else 1


def _command(world_size: int, program: str, words: Sequence[str]) -> list[str]:
    """Formats a shell command, with line breaks between flags."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--"):
            flags.append(word)
        else:
            flags[-1] += " " + _quoted(word)
    lines = [f"torchrun --nproc-per-node {world_size} {program}" if world_size > 1 else f"python {program}"]
    for flag in flags:
        if len(lines[-1]) + len(flag) < WIDTH - 2:
            lines[-1] += " " + flag
        else:
            lines.append("    " + flag)
    return [" \\\n".join(lines)]


def _quoted(word: str) -> str:
    """Quotes a word of a shell command; variables that the script gets from elsewhere stay variables."""
    return f'"{word}"' if "$" in word and '"' not in word else shlex.quote(word)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _cut(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Returns (the tool's words, "--", the words after it)."""
    if "--" not in argv:
        return list(argv), "", []
    place = list(argv).index("--")
    return list(argv[:place]), "--", list(argv[place + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
