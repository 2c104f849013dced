"""Prepares a process before a run is built: device, groups and heartbeat, and folders locked against other jobs."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

from megatron.base.cuda_environment import set_deterministic
from megatron.base.errors import ConfigError, UserError
from megatron.base.hang import HangWatch
from megatron.base.heartbeat import Heartbeat
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.communicators import communicator_settings
from megatron.config.context_parallel import context_sizes, inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import passes_around
from megatron.config.run import RunConfig
from megatron.core.comm.connections import open_connections
from megatron.core.comm.flight_record import flight_record
from megatron.core.device import allow_open_files, check_shared_device, choose_device, set_cpu_threads, use_device
from megatron.core.dist_checkpointing.lock import hold
from megatron.core.groups import Groups, backend_for, connect, create_groups
from megatron.training.together import together

log = get_logger(__name__)


def start_process(
    parallel: ParallelConfig,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    *,
    deterministic: bool = False,
    spares: int = 0,
) -> tuple[Groups, torch.device]:
    """Returns the process groups, with the heartbeat, and the device of this process. Collective over the world and
    `spares` further processes, which call `core.groups.wait_as_spare`.

    `deterministic` makes torch use deterministic algorithms, and sets the environment variables for it.
    """
    try:
        if deterministic and parallel.device != "cpu" and torch.cuda.is_available():
            set_deterministic(os.environ)
        device = choose_device(parallel.device, local_rank)
    except UserError as error:
        error.on_all_ranks = False  # other hosts may have other devices
        raise
    set_cpu_threads(device, local_world_size)
    allow_open_files()
    if deterministic:
        torch.use_deterministic_algorithms(True)
    timeout = parallel.distributed_timeout_minutes * 60
    backend = backend_for(device, parallel.distributed_backend)
    check_shared_device(parallel.device, backend, os.environ)
    heartbeat = connect(rank, world_size, backend=backend, timeout_seconds=timeout, spares=spares)
    heartbeat.start(on_stall=log.error, on_orphaned=_end_orphan, in_thread=lambda: use_device(device))
    groups = groups_of(parallel, world_size, rank, heartbeat)
    if backend == "nccl" and world_size > 1:  # gloo connects a group when it is made
        started = time.monotonic()
        number = open_connections(groups, device, ring=passes_around(parallel))
        log.info("opened %d NCCL communicators in %.1f s", number, time.monotonic() - started)
    return groups, device


def groups_of(parallel: ParallelConfig, world_size: int, rank: int, heartbeat: Heartbeat) -> Groups:
    """Returns the process groups that the flags ask for. Collective over the world."""
    mesh = mesh_of(parallel, world_size)
    return create_groups(
        mesh,
        rank,
        heartbeat,
        parallel.distributed_timeout_minutes * 60,
        optimizer_instances=data_parallel_settings(parallel).optimizer_instances,
        context_inner=inner_size(parallel),
        context_sizes=context_sizes(parallel, mesh),
        options=communicator_settings(parallel),
    )


def _end_orphan(message: str) -> NoReturn:
    """Ends this rank immediately: its main thread waits for ranks that do not come any more, and a restarted job needs
    its folders."""
    log.error("this rank ends: %s", message)
    os._exit(1)


def watch_progress(run: RunConfig, groups: Groups) -> None:
    """From now on a rank that makes no progress is reported, and ended with --calc-ft-timeouts: see base/hang.py."""
    heartbeat, warmup = groups.heartbeat, run.parallel.ft_num_warmup_iters
    if run.train.cuda_graph_impl != "none":  # the step that captures graphs is a long one
        warmup = max(warmup, run.train.cuda_graph_warmup_steps + 2)
    heartbeat.times.warmup, heartbeat.times.rare_floor = warmup, heartbeat.timeout
    if run.data.perform_rl_step:  # a batch takes as long as its longest answer
        heartbeat.times.of_step -= {"batch-generator"}

    def end(reason: str) -> NoReturn:
        heartbeat.fail(reason)
        _end_orphan(reason)

    HangWatch(
        heartbeat,
        groups.world.size,
        say=log.warning,
        end=end if run.parallel.calc_ft_timeouts else None,
        device_record=flight_record,
    )


def hold_folders(checkpoint: CheckpointConfig, groups: Groups, held: ExitStack) -> None:
    """Locks --save and --save-hf against other jobs until `held` is closed. Collective over the world.

    This is the first write of a run, so it also detects folders that cannot be written. Raises ConfigError and
    CheckpointError.
    """

    def hold_all() -> None:
        for flag, folder in (("--save", checkpoint.save), ("--save-hf", checkpoint.save_hf)):
            if folder is None:
                continue
            try:
                held.enter_context(hold(Path(folder)))
            except OSError as error:
                raise ConfigError(
                    f"{flag} {folder} cannot be written ({error.strerror}); give another folder"
                ) from error

    together(groups.world, hold_all if groups.rank == 0 else lambda: None)


def open_heartbeat_files(heartbeat_dir: str | None, save: str | None, groups: Groups) -> None:
    """Opens a file with every rank's phase under --heartbeat-dir or --save, if one is given. Collective over the world.

    Raises ConfigError if it cannot be written.
    """
    flag = f"--heartbeat-dir {heartbeat_dir}" if heartbeat_dir else f"--save {save}"
    directory = heartbeat_dir or (f"{save}/heartbeat" if save else None)

    def write() -> None:
        try:
            if directory:
                groups.heartbeat.write_to(Path(directory))
        except OSError as error:
            raise ConfigError(f"{flag} cannot be written ({error.strerror}); give another folder") from error

    together(groups.world, write)
