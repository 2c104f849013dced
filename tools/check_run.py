"""Checks a training command as its processes do before they meet: flags, and the model's shape in the files that they
name.

  python tools/check_run.py -- torchrun --nproc-per-node 8 pretrain_gpt.py --load-hf DIR --data-path ...

Starts nothing. The launch scripts in examples/ call it before torchrun, which would start a mistake again and again.
Exit code 0: the processes would go on; 2: they would not, with a line for each mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.command_line.entry import mistakes, takes_shape_from_files
from megatron.command_line.exits import exit_code
from megatron.command_line.programs import flags_of_program
from megatron.command_line.read import read
from megatron.config.mesh import smallest_world
from megatron.config.rules.check import check
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
    world_size = line.run.dry_run.ranks(command.world or smallest_world(line.run.parallel))
    if faults := mistakes(line, world_size):
        raise ConfigError(*faults)
    if takes_shape_from_files(line.run.checkpoint):
        check(take_shape_from_files(line.run), world_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
