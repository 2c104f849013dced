"""What a launcher tells this process: its place in a job, by variables, and that it shall stop, by signals. No
torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from megatron.base.errors import ConfigError

# SIGTERM: a cluster manager ends the job. torchrun passes it on to its workers and kills them 30 s later.
# SIGUSR1: a batch system's early warning. Send it to the workers: torchrun itself does not handle it.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Of launchers that start a process per rank and do not set these names: the number of processes, the number of this
# one, and its number on its host.
_LAUNCHERS = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun of MVAPICH2": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "mpirun": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
}


def launch_environment() -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) as torchrun set them, or those of a single process without a launcher.

    Raises ConfigError if they are not valid numbers, if some are missing in a job of several processes, or if another
    launcher started several processes: each would take itself for the only one, and train on its own.
    """
    variables = {name: os.environ[name] for name in _NAMES if name in os.environ}
    if not variables:
        _refuse_other_launchers(os.environ)
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0} | variables
    try:
        rank, world_size, local_rank = (int(value) for value in numbers.values())
    except ValueError:
        rank = world_size = local_rank = -1
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise ConfigError(f"the environment says {words}, which no launcher sets; unset them, or start with torchrun")
    missing = [name for name in _NAMES if name not in variables]
    if missing and (world_size > 1 or "RANK" in variables):
        raise ConfigError(
            f"the environment says {words} without {', '.join(missing)}, so processes cannot tell themselves apart; "
            "start with torchrun, or set all three"
        )
    return rank, world_size, local_rank


def lone_torchrun() -> str | None:
    """Returns a warning for a torchrun of one host that a launcher started several times, or None.

    Each may be a training of its own. It is no error, because a job of several hosts may go on with one.
    """
    # The number of tasks of a job, SLURM_NTASKS, is there without srun, too.
    sizes = ("SLURM_STEP_NUM_TASKS", *(size for launcher, (size, _, _) in _LAUNCHERS.items() if launcher != "srun"))
    for size in sizes:
        count = os.environ.get(size, "")
        if os.environ.get("GROUP_WORLD_SIZE") == "1" and count.isdecimal() and int(count) > 1:
            return (
                f"{size}={count} processes were started, and this torchrun knows no other host; if each of them starts "
                f"one, {count} trainings run beside each other: give torchrun --nnodes with --rdzv-endpoint"
            )
    return None


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a process that another launcher started as one of several.

    A shell of Slurm's salloc has a number of tasks, but is none of them.
    """
    for launcher, (size, rank, local) in _LAUNCHERS.items():
        count = environment.get(size, "")
        if rank in environment and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{launcher} has {count} processes ({size}={count}) and this one has no RANK, so each would train "
                f"alone; start torchrun once on each host, or set RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local} "
                f"with MASTER_ADDR and MASTER_PORT in each; for one process alone unset {size}"
            )


def block_exit_signals() -> None:
    """Lets exit signals wait until ExitSignals opens: torch takes seconds to import."""
    signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_SIGNALS)
