"""Explains the effect of a Megatron command line on this program, flag by flag, without starting it. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.command_line.entry import mistakes, takes_shape_from_files
from megatron.command_line.programs import flags_of_program
from megatron.command_line.programs import refusal as program_refusal
from megatron.command_line.read import UNKNOWN, Outcome, TypedFlag, by_flag, read
from megatron.config.flag_table import ALIAS, READ, REFUSE
from megatron.config.mesh import smallest_world
from megatron.config.rules.needs import notes

_FLAG = re.compile(r"--[a-z][\w-]*")
_SHELL = re.compile(r"\$[\w({]|`")  # a variable or a command of the script's shell


@dataclass(frozen=True)
class Verdict:
    """The result of checking a command line.

    `outcomes` has one entry per flag; flags without an effect in this run count as noop. `problems` holds the reasons
    why the command is rejected, one line each, with the flags that the line names. `words` is the equivalent command
    line of this program. `unknown` lists flags with a value that only the script's shell knows, which are not checked.
    """

    world_size: int
    outcomes: tuple[Outcome, ...]
    problems: tuple[tuple[str, tuple[str, ...]], ...]
    words: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether a run would start; files are not checked."""
        return not self.problems


def check_command(argv: Sequence[str], world_size: int | None, program: str | None = None) -> Verdict:
    """Returns the verdict on a command line on `world_size` processes; None uses the fewest that its layout allows.

    `program` is the path of the program that the command starts; None stands for pretrain_gpt.py.
    """
    line = read(argv)
    unknown = [
        outcome.typed
        for outcome in line.outcomes
        if any(map(_SHELL.search, outcome.typed.words))
        and any(problem.startswith(f"{outcome.typed.flag}: ") for problem in line.problems)
    ]
    if unknown:
        checked = check_command(_without(argv, line.outcomes, unknown), world_size, program)
        open_flags = {typed.flag for typed in unknown}
        return replace(
            checked,
            problems=tuple(
                (text, flags) for text, flags in checked.problems if not open_flags & set(_FLAG.findall(text))
            ),
            words=(*checked.words, *(word for typed in unknown for word in (typed.flag, *typed.words))),
            unknown=tuple(map(str, unknown)),
        )
    typed = {outcome.typed.flag for outcome in line.outcomes}
    if added := flags_of_program(program, typed):
        line = read([*argv, *added])
    world = world_size or smallest_world(line.run.parallel)
    faults = mistakes(line, world)
    of_flag = {o.why: (o.typed.flag,) for o in line.outcomes if o.kind in (REFUSE, UNKNOWN)}
    judged = line.is_whole and len(faults) == len(line.problems) and not takes_shape_from_files(line.run.checkpoint)
    unused = {note.flag: note for note in notes(line.run)} if judged else {}
    outcomes = tuple(
        replace(o, kind="noop", in_effect=note.in_effect, why=note.why)
        if o.kind == READ and (note := unused.get(o.typed.flag))
        else o
        for o in line.outcomes
    )
    words = tuple(word for o in outcomes if o.kind in (READ, ALIAS) for word in o.meant)
    named = [(text, of_flag.get(text) or tuple(sorted(set(_FLAG.findall(text)) & typed))) for text in faults]
    if (reason := program_refusal(program)) is not None:
        named.insert(0, (reason, ()))
    return Verdict(world, tuple(o for o in outcomes if o.typed.flag in typed), tuple(named), words)


def _without(argv: Sequence[str], outcomes: Sequence[Outcome], left_out: Sequence[TypedFlag]) -> list[str]:
    """Returns the words of the other flags."""
    chunks = by_flag(argv)
    stray = len(chunks) - len(outcomes)
    words = [word for chunk in chunks[:stray] for word in chunk]
    for chunk, outcome in zip(chunks[stray:], outcomes, strict=True):
        words += [] if outcome.typed in left_out else chunk
    return words
