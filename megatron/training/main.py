"""Runs the configuration of a run to its end, and handles every way in which it can end.

Exit codes: 0 done or stopped on request; 2 invalid input of the user (one line on stderr, from one rank); 16 and 17 a
suspicious number of a step (result_check.py); 130 Ctrl-C; 1 anything else, including a lost rank.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack

import torch

from megatron.base.errors import (
    USER_ERROR_EXIT_CODE,
    CommError,
    ConfigError,
    DataError,
    MegatronError,
    TrainingError,
)
from megatron.base.launch import launch_environment, lone_torchrun
from megatron.base.log import get_logger, setup_logging
from megatron.command_line.ending import as_lines, end, let_rank_0_speak
from megatron.command_line.entry import takes_shape_from_files
from megatron.command_line.exits import as_user_error
from megatron.command_line.flag_listing import announce_flags
from megatron.command_line.last_attempt import leave_reason
from megatron.config.elastic import training_world
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import barrier
from megatron.core.groups import Groups, disconnect, wait_as_spare
from megatron.training.callbacks import Checkpoint, Curves, Evaluate, Exit, GarbageCollection, Log
from megatron.training.dry_run.main import dry_run
from megatron.training.logging.memory import LogMemory, PeakMemory
from megatron.training.logging.plan import LogPlan
from megatron.training.logging.progress import ProgressLine, terminal_console
from megatron.training.logging.writers import Metrics, check_writers, open_writers
from megatron.training.loop import Callback, fit
from megatron.training.not_finite import NotFinite
from megatron.training.process import hold_folders, open_heartbeat_files, start_process, watch_progress
from megatron.training.profile import ProfileTimeline
from megatron.training.replicas import CompareReplicas
from megatron.training.setup import build
from megatron.training.signals import ExitSignals, Interrupt, StopRelay, StopRequest
from megatron.training.start import take_shape_from_files
from megatron.training.stragglers import LogStragglers
from megatron.training.together import together
from megatron.training.trainer import Trainer

log = get_logger(__name__)
INTERRUPTED_EXIT_CODE = 130  # the exit code of shells for Ctrl-C
# Ctrl-C reaches all ranks at once, and torchrun, which passes it on, then waits for every one of them.
INTERRUPTED_SILENT_SECONDS = 0.5


# Builds the trainer of a run, and the callbacks that it has beyond those of every run.
Builder = Callable[[RunConfig, Groups, torch.device], Trainer]
FurtherCallbacks = Callable[[Trainer, Metrics], list[Callback]]


def main(
    run: RunConfig, builder: Builder = build, further_callbacks: FurtherCallbacks = lambda trainer, metrics: []
) -> None:
    """Builds and trains the run of a command line. Ends the process with the exit codes above after an error."""
    started = time.monotonic()
    rank = local_rank = 0

    def interrupted() -> None:
        if rank != 0:
            let_rank_0_speak(local_rank, INTERRUPTED_EXIT_CODE, INTERRUPTED_SILENT_SECONDS)
        end("interrupted", INTERRUPTED_EXIT_CODE)

    def end_anyway() -> None:
        if rank != 0:
            os._exit(INTERRUPTED_EXIT_CODE)
        end("interrupted", INTERRUPTED_EXIT_CODE)

    answers = run.train.exit_signal_handler and not run.dry_run.dry_run
    with ExitSignals(enabled=answers) as signals, Interrupt(end_anyway) as interrupt:
        try:
            rank, world_size, local_rank = launch_environment()
            world_size = run.dry_run.ranks(world_size)
            setup_logging(rank)
            if rank == 0 and (warning := lone_torchrun()):
                log.warning(warning)
            if takes_shape_from_files(run.checkpoint):
                run = take_shape_from_files(run)
                check(run, training_world(run, world_size))
            announce_flags(run)
            training = training_world(run, world_size)
            if run.dry_run.dry_run:
                dry_run(run, training)
                return
            if rank >= training:
                launcher = os.getppid()
                wait_as_spare(
                    *(rank, world_size),
                    timeout_seconds=run.parallel.distributed_timeout_minutes * 60,
                    stops=lambda: signals.received is not None or os.getppid() != launcher,
                )
                return
            spares = world_size - training
            pretrain(run, rank, training, spares, local_rank, started, signals, builder, further_callbacks)
        except KeyboardInterrupt:
            interrupted()
        except TrainingError as error:
            if rank != 0:
                let_rank_0_speak(local_rank, error.exit_code)
            if error.recurs:
                leave_reason(run.checkpoint.save, f"error: {error}", error.exit_code)
            end(f"error: {error}", error.exit_code)
        except Exception as error:
            if interrupt.received:
                interrupted()
            mistake = as_user_error(error)
            if mistake is not None:
                if rank != 0 and mistake.on_all_ranks:
                    let_rank_0_speak(local_rank, USER_ERROR_EXIT_CODE)
                # A file that one rank cannot read, or a save that failed, may be well again in the next attempt.
                if isinstance(mistake, ConfigError | DataError) and mistake.on_all_ranks:
                    leave_reason(run.checkpoint.save, as_lines(mistake), USER_ERROR_EXIT_CODE)
                end(as_lines(mistake), USER_ERROR_EXIT_CODE)
            if isinstance(error, MegatronError):
                end(f"error on rank {rank}: {error}", 1)
            traceback.print_exc()
            end(f"error on rank {rank}: {_short(error)}", 1)


def pretrain(
    run: RunConfig,
    rank: int,
    world_size: int,
    spares: int,
    local_rank: int,
    started: float,
    signals: ExitSignals,
    builder: Builder,
    further_callbacks: FurtherCallbacks,
) -> None:
    """Builds everything and trains. `started`: monotonic seconds. `spares`: processes that wait. Collective over the
    world."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    deterministic = run.train.deterministic_mode
    groups, device = start_process(
        run.parallel, rank, world_size, local_rank, local_world_size, deterministic=deterministic, spares=spares
    )
    stop = StopRequest(signals, run.train.exit_duration_in_mins, started, rank)
    relay = StopRelay(stop, groups.heartbeat)
    with ExitStack() as held:
        try:
            with groups.heartbeat.phase("set-up"):
                together(groups.world, lambda: check_writers(run.logging) if rank == 0 else None)
                peak = PeakMemory(device) if run.logging.log_memory else None  # it counts what is made after it
                trainer = builder(run, groups, device)
                if not run.train.skip_train:
                    hold_folders(run.checkpoint, groups, held)
                open_heartbeat_files(run.parallel.heartbeat_dir, run.checkpoint.save, groups)
            if run.train.exit_signal_handler or run.train.exit_duration_in_mins is not None:
                trainer.stop_wanted = lambda: stop.wanted is not None
            console = terminal_console(run.logging.progress_bar and rank == 0)
            with ProgressLine(trainer.total_iterations, trainer.state.iteration, console) as progress:
                callbacks = build_callbacks(trainer, stop, relay, progress, peak, further_callbacks)
                with groups.heartbeat.phase("train"):
                    watch_progress(run, groups)
                    reason = fit(trainer, callbacks)
            trainer.close()
            if reason:
                log.info("stopped at iteration %d: %s", trainer.state.iteration, reason)
            barrier(groups.world)
        except BaseException as error:
            groups.heartbeat.fail(_short(error))
            raise
    disconnect(groups.heartbeat)


def build_callbacks(
    trainer: Trainer,
    stop: StopRequest,
    relay: StopRelay,
    progress: ProgressLine,
    peak: PeakMemory | None,
    further_callbacks: FurtherCallbacks,
) -> list[Callback]:
    """Returns callbacks in the order in which they act after a step; they end in reverse: Log last, with every loss
    known.
    """
    run, state, curves, speaks = trainer.run, trainer.state, Curves(), trainer.groups.rank == 0
    writers = together(
        trainer.groups.world,
        lambda: (
            open_writers(run.logging, run.checkpoint.save, run.to_dict(), state.iteration, state.consumed_samples)
            if speaks
            else []
        ),
    )
    metrics = Metrics(writers, run.logging.tensorboard_log_interval, trainer.device)
    callbacks: list[Callback] = [Log(metrics, curves, progress), Evaluate(metrics, curves, stop)]
    callbacks += further_callbacks(trainer, metrics)
    exits = Exit(stop, relay)
    if run.train.skip_train:
        return [*callbacks, exits]
    if peak is not None:
        callbacks.append(LogMemory(peak))
    if run.logging.plan:
        callbacks.append(together(trainer.groups.world, lambda: LogPlan(trainer)))
    if run.logging.profile_timeline:
        callbacks.append(ProfileTimeline())
    if run.logging.log_straggler:
        callbacks.append(LogStragglers(run.logging.straggler_minmax_count, launch_environment()[2]))
    replicas = CompareReplicas(run.train.check_weight_hash_across_dp_replicas_interval)
    callbacks += [replicas, Checkpoint(stop, replicas.compare), NotFinite(), exits]
    return [*callbacks, GarbageCollection()] if run.train.manual_gc else callbacks


def _short(error: BaseException) -> str:
    """Returns one line: errors of this program without, others with their type."""
    line = " ".join(str(error).splitlines()) or type(error).__name__
    if isinstance(error, CommError):
        return "it lost other ranks, too"  # its own report says which; quoting it here would only hide the first cause
    mistake = error if isinstance(error, MegatronError) else as_user_error(error)
    return str(mistake) if mistake else f"{type(error).__name__}: {line}"
