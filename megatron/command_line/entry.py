"""Reads and checks the command line of a training program before torch is imported, so that mistakes show
immediately."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from megatron.base.cuda_environment import set_allocator
from megatron.base.errors import USER_ERROR_EXIT_CODE, ConfigError
from megatron.base.launch import launch_environment
from megatron.command_line.ending import as_lines, end, let_rank_0_speak
from megatron.command_line.last_attempt import reason_left
from megatron.command_line.read import CommandLine, help_if_asked, read
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.elastic import fitted, training_world
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig, with_batch_of_answers


def run_of(argv: Sequence[str], description: str) -> RunConfig:
    """Returns the run that a command line asks for. Ends the process with exit code 2 and one line per mistake, or as
    the last attempt of this job ended if this one would, too.

    Sets the default of torch's CUDA allocator, which torch reads while it is imported.

    Checks that depend on files (the shape of --load-hf's model, an adapter) follow in `training/main.py`.
    """
    rank = local_rank = 0
    try:
        rank, world_size, local_rank = launch_environment()
        help_if_asked(argv, description)
        line = read(argv)
        line = replace(line, run=with_batch_of_answers(line.run))
        processes = line.run.dry_run.ranks(world_size)
        line = replace(line, run=fitted(line.run, processes))
        if faults := mistakes(line, training_world(line.run, processes)):
            raise ConfigError(*faults)
        if not line.run.dry_run.dry_run and (left := reason_left(line.run.checkpoint.save)) is not None:
            message, code = left
            if rank != 0:
                let_rank_0_speak(local_rank, code)
            end(f"{message}\nnot started again: the attempt before ended so, and this one would, too", code)
        if line.run.parallel.device != "cpu":
            set_allocator(os.environ)
        return line.run
    except ConfigError as error:
        if rank != 0:
            let_rank_0_speak(local_rank, USER_ERROR_EXIT_CODE)
        end(as_lines(error), USER_ERROR_EXIT_CODE)


def mistakes(line: CommandLine, world_size: int) -> list[str]:
    """Returns the mistakes of a command line on `world_size` processes, one line each: of its words, and by the
    rules."""
    judged = line.is_whole and not takes_shape_from_files(line.run.checkpoint)
    return [*line.problems, *(problems(line.run, world_size) if judged else ())]


def takes_shape_from_files(checkpoint: CheckpointConfig) -> bool:
    """Returns whether the model is only known once the files of --load-hf or --load-adapter are read."""
    return checkpoint.load_hf is not None or checkpoint.load_adapter is not None
