"""The command line of a training program, read and checked before torch is imported, so that mistakes are told at once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import USER_ERROR_EXIT_CODE, ConfigError
from megatron.base.launch import launch_environment
from megatron.command_line.ending import as_lines, end, let_rank_0_speak
from megatron.command_line.read import CommandLine, help_if_asked, read
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig


def run_of(argv: Sequence[str], description: str) -> RunConfig:
    """The run that a command line asks for. Ends the process with exit code 2 and a line for each mistake.

    What depends on files (the shape of --load-hf's model, an adapter) is checked by `training/main.py`.
    """
    rank = local_rank = 0
    try:
        rank, world_size, local_rank = launch_environment()
        help_if_asked(argv, description)
        line = read(argv)
        if found := mistakes(line, world_size):
            raise ConfigError(*found)
        return line.run
    except ConfigError as error:
        if rank != 0:
            let_rank_0_speak(local_rank, USER_ERROR_EXIT_CODE)
        end(as_lines(error), USER_ERROR_EXIT_CODE)


def mistakes(line: CommandLine, world_size: int) -> list[str]:
    """What is wrong with a command line on so many processes, one line each: its words, and what rules can judge."""
    judged = line.is_whole and not takes_shape_from_files(line.run)
    return [*line.problems, *(problems(line.run, world_size) if judged else ())]


def takes_shape_from_files(run: RunConfig) -> bool:
    """Whether the model is only known once the files that --load-hf or --load-adapter names are read."""
    return run.checkpoint.load_hf is not None or run.checkpoint.load_adapter is not None
