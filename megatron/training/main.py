"""From the command line to a finished run, and every way it can end.

Exit codes: 0 done or stopped on request; 2 the user gave something that cannot work (one line on stderr, from one rank);
1 anything else, a lost rank included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.config.rules import check
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import barrier
from megatron.core.errors import USER_ERROR_EXIT_CODE, CommError, UserError
from megatron.core.groups import disconnect, launch_environment
from megatron.core.log import get_logger, setup_logging
from megatron.training.arguments import parse, print_arguments
from megatron.training.callbacks import Checkpoint, Curves, Evaluate, Exit, GarbageCollection, Log
from megatron.training.loop import Callback, fit
from megatron.training.setup import build, start_process
from megatron.training.signals import ExitSignals
from megatron.training.trainer import Trainer
from megatron.training.writers import Metrics, open_writers

log = get_logger(__name__)


def main(argv: Sequence[str], description: str) -> None:
    """Parse, check, build, train. Ends the process with the exit codes above when something is wrong."""
    rank, world_size, local_rank = launch_environment()
    setup_logging(rank)
    try:
        run = parse(argv, description=description)
        check(run, world_size)
        log.info(print_arguments(run))
        pretrain(run, rank, world_size, local_rank)
    except UserError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr)
        _die(USER_ERROR_EXIT_CODE)
    except CommError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr)
        _die(1)


def pretrain(run: RunConfig, rank: int, world_size: int, local_rank: int) -> None:
    """Build everything and train. Collective over the world."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    groups, device = start_process(run, rank, world_size, local_rank, local_world_size)
    with ExitSignals(enabled=run.train.exit_signal_handler) as signals:
        trainer = build(run, groups, device)
        callbacks = build_callbacks(trainer, signals)
        if run.train.skip_train:
            callbacks = [c for c in callbacks if isinstance(c, Log | Evaluate)]
            for callback in callbacks:
                callback.start(trainer)
            for callback in reversed(callbacks):
                callback.end(trainer, None)
            reason = None
        else:
            reason = fit(trainer, callbacks)
    if reason:
        log.info("stopped at iteration %d: %s", trainer.state.iteration, reason)
    barrier(groups.world)
    disconnect(groups.heartbeat)


def build_callbacks(trainer: Trainer, signals: ExitSignals) -> list[Callback]:
    """In the order they act after a step; they end in reverse: the checkpoint first, Log last with every loss known."""
    run, curves = trainer.run, Curves()
    writers = open_writers(run.logging, run.checkpoint.save, run.to_dict()) if trainer.groups.rank == 0 else []
    metrics = Metrics(writers, run.logging.tensorboard_log_interval, trainer.device)
    callbacks: list[Callback] = [Log(metrics, curves), Evaluate(metrics, curves), Checkpoint(), Exit(signals)]
    return [*callbacks, GarbageCollection()] if run.train.manual_gc else callbacks


def _die(code: int) -> NoReturn:
    """End at once: tearing down process groups would wait for ranks that may never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
