"""Checks a training command as its processes do before they meet: flags, and the model's shape in the files that they
name.

  python tools/check_run.py -- torchrun --nproc-per-node 8 pretrain_gpt.py --load-hf DIR --data-path ...

With torchrun --nnodes MIN:MAX every number of nodes is checked, and with --elastic-world a line says for each how many
processes train, and with which micro batch, where these are not those of the command. Starts nothing. The launch
scripts in examples/ call it before torchrun, which would start a mistake again and again.
Exit code 0: the processes would go on; 2: they would not, with a line for each mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron.base.errors import ConfigError
from megatron.command_line.entry import mistakes, takes_shape_from_files
from megatron.command_line.exits import exit_code
from megatron.command_line.programs import flags_of_program
from megatron.command_line.read import read
from megatron.config.elastic import fitted, training_world
from megatron.config.mesh import smallest_world
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig
from megatron.tooling.launch_script.commands import read_launch
from megatron.training.start import take_shape_from_files


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; see the head of this file."""
    return exit_code(lambda: run(argv))


def run(argv: Sequence[str]) -> None:
    """Checks the command after `--`. Raises UserErrors."""
    commands = read_launch(argv[1:]) if argv[:1] == ["--"] else []
    if len(commands) != 1:
        raise ConfigError("give one training command after --; python tools/check_flags.py reads scripts, too")
    (command,) = commands
    line = read([*flags_of_program(command.program, ()), *command.argv])
    size = line.run.dry_run.ranks(command.world or smallest_world(line.run.parallel))
    worlds = dict(command.worlds) or {0: size}

    def refuse(run: RunConfig, judge: Callable[[RunConfig, int], list[str]]) -> None:
        faults = {n: judge(fitted(run, world), training_world(run, world)) for n, world in worlds.items()}
        if any(faults.values()):
            raise ConfigError(*report(faults))

    refuse(line.run, lambda run, world: mistakes(replace(line, run=run), world))
    if takes_shape_from_files(line.run.checkpoint):
        refuse(take_shape_from_files(line.run), problems)
    for nodes, processes in command.worlds:
        for note in fitted(line.run, processes).notes[len(line.run.notes) :]:
            print(f"--nnodes {nodes}: {note.flag} {note.in_effect} in place of {note.requested}: {note.why}")


def report(faults: Mapping[int, Sequence[str]]) -> list[str]:
    """Returns each mistake once, with the numbers of nodes that have it and those that fit if these differ."""
    lines = []
    for fault in dict.fromkeys(fault for some in faults.values() for fault in some):
        sizes = [nodes for nodes, some in faults.items() if fault in some]
        fit = [nodes for nodes, some in faults.items() if not some]
        if len(sizes) < len(faults):
            fault = f"with --nnodes {_numbers(sizes)}: {fault}; the command fits --nnodes {_numbers(fit)}"
        lines.append(fault)
    return lines


def _numbers(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "of no size"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
