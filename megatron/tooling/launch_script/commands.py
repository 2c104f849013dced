"""Finds the training commands in a Megatron launch script or command line, without running anything. No torch.

A script is read, not run: comments, quotes, variables, arrays, defaults such as `${1:-x}`, whole-number arithmetic,
loops, functions, `eval`, `bash -c` and scripts that it starts are followed. Values that only a run could determine (the
output of most commands, files, variables that the script does not set) keep the script's text, such as $DATA_PATH, and
are listed. A condition with an unknown result is assumed to hold, and listed, too; an unset variable in it is empty, as
in bash.
"""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.processes import (
    elastic_world_sizes,
    job_variables,
    slurm_variables,
    world_size,
)
from megatron.tooling.launch_script.shell.interpret import SHELLS, Invocation, invocations
from megatron.tooling.launch_script.shell.unknown import CLOSE, OPEN, plain, unknowns

_PROGRAM = re.compile(r"(?:pretrain|posttrain|finetune|train)\w*\.py")
_OTHER_PROGRAM = re.compile(r"#!(?!.*sh\b)")  # the first line of a file that is not a shell script
_RUNNER = re.compile(r"(?:python[\d.]*|torchrun|deepspeed|accelerate|msrun)")
# A Megatron command with an unknown program name is recognised by one of these flags.
_TELLTALES = ("--num-layers", "--micro-batch-size", "--tensor-model-parallel-size", "--seq-length")
MOST_ABOVE = 4  # folders above a script's folder in which scripts that it starts are looked for
_PRINTERS = ("echo", "printf")
LAUNCHERS_OF_SCRIPTS = (*SHELLS, "sbatch", "source")


@dataclass(frozen=True)
class Command:
    """A training command.

    `argv` holds the words after the program. `world` is the number of its processes, or None if it is unknown.
    `program` is the program's path as written in the command, None for flags alone. `unresolved` lists the unknown
    parts of argv, such as $DATA_PATH. `assumed` lists conditions of the script whose result is unknown, with the
    assumption made. `worlds` holds nodes and processes of each size that a range of nodes allows.
    """

    argv: tuple[str, ...]
    world: int | None
    program: str | None
    unresolved: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    worlds: tuple[tuple[int, int], ...] = ()


def read_launch(words: Sequence[str]) -> list[Command]:
    """Returns the commands in a user's words.

    These may be a script's path and its arguments, with or without `bash` before it; a whole command; its flags alone;
    or any of these as one text. Raises ConfigError for a script that cannot be read.
    """
    text = words[0] if len(words) == 1 else shlex.join(words)
    if text.lstrip().startswith("-"):
        return [_flags_of(invocation) for invocation in invocations(text, (), {}, lambda name: None)]
    at = 1 if words and os.path.basename(words[0]) in LAUNCHERS_OF_SCRIPTS else 0
    if words[at:] and not words[at].endswith(".py") and not _runs(words[at]) and _is_file(words[at]):
        return read_path(Path(words[at]), words[at + 1 :])
    return read_script(text, open_file=lambda name: _find(Path.cwd(), name))


def read_path(path: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> list[Command]:
    """Returns the training commands of a script in a file; scripts that it starts are looked for by `_find`."""
    script = str(path.absolute())
    return read_script(_text_of(path), arguments, environment, lambda name: _find(path.parent, name), script)


def read_script(
    text: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    open_file: Callable[[str], str | None] = lambda name: None,
    script: str = "",
) -> list[Command]:
    """Returns the training commands of a script, each once, in the order in which they are reached.

    `arguments` are those of the script, and `script` is its path. `environment` holds variables that are set before it
    starts; SLURM's follow from its #SBATCH lines. `open_file` returns the text of another script by the name used to
    call it, or None. Raises ConfigError with the line that is not valid bash.
    """
    variables = {**slurm_variables(text), **(environment or {})}
    commands = [
        _command(invocation)
        for invocation in invocations(text, tuple(arguments), variables, open_file, script, job_variables)
    ]
    return list(dict.fromkeys(command for command in commands if command is not None))


def _command(invocation: Invocation) -> Command | None:
    """Returns the invocation as a training command; None if it is another command."""
    words = invocation.words
    at = _program(words)
    if at is None or words[0] in _PRINTERS:
        return None
    if words[0] == "xargs":
        raise ConfigError("xargs reads words of the training command from its input; give the command itself")
    launcher = [*(word for outer in invocation.launchers for word in outer), *words[:at]]
    flags = _flags_of(replace(invocation, words=words[at + 1 :]))
    program = plain(words[at])
    assumed = flags.assumed if program.endswith(".py") else (*flags.assumed, f"{program} is pretrain_gpt.py")
    world, worlds = world_size(launcher, invocation.variables), tuple(elastic_world_sizes(launcher).items())
    return replace(flags, world=world, program=program, assumed=assumed, worlds=worlds)


def _flags_of(invocation: Invocation) -> Command:
    """Returns the invocation with all its words as flags."""
    unresolved = dict.fromkeys(source for word in invocation.words for source in unknowns(word))
    return Command(tuple(map(plain, invocation.words)), None, None, tuple(unresolved), invocation.assumed)


def _program(words: Sequence[str]) -> int | None:
    """Returns the position of the program: after python or a launcher, under a name that training programs have."""
    for at, word in enumerate(words):
        if _PROGRAM.fullmatch(os.path.basename(plain(word))) and (at == 0 or any(map(_runs, words[:at]))):
            return at
    # The program's name is unknown: take an unknown word before the flags of a command that can only be Megatron's.
    flags = next((at for at, word in enumerate(words) if word in _TELLTALES), 0)
    unknown = (
        at
        for at in range(1, flags)
        if words[at].startswith(OPEN) and not words[at - 1].startswith("-") and words[at + 1].startswith("-")
    )
    position = next(unknown, None)
    return position if position is not None and any(map(_runs, words[:position])) else None


def _runs(word: str) -> bool:
    return _RUNNER.fullmatch(os.path.basename(word)) is not None or word.startswith(OPEN)


def _find(folder: Path, name: str) -> str | None:
    """Returns the text of a script by the name used to call it.

    The folder where a script is started is not known. So it is looked for where this program runs, in the folder of the
    script that calls it, and in those above.
    """
    ending = name[name.rindex(CLOSE) + 1 :].lstrip("/") if CLOSE in name else name
    folder = folder.absolute()
    paths = [place / ending for place in (Path.cwd(), folder, *list(folder.parents)[:MOST_ABOVE])]
    path = next((path for path in paths if _is_file(str(path))), None)
    text = "" if path is None or path.suffix == ".py" else _text_of(path)
    return text if text and "\0" not in text and _OTHER_PROGRAM.match(text) is None else None


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or with a character that no path has
        return False


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
