"""SAVE/progress.txt of --log-progress: one line per start and save of a run, over all its jobs.

It has Megatron-LM's columns, separated by tabs: Megatron-LM's --log-progress can continue a file of this program, and
vice versa.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron.base.plain_file import open_plain

_TIME = "%Y-%m-%d %H:%M:%S"
STARTING, SAVED = "Starting job", "Saved checkpoint"


@dataclass(frozen=True)
class JobStart:
    """The first start of jobs with this number of processes,
    and the model FLOPs that had been done and saved by then."""

    time: datetime
    floating_point_operations: float


class ProgressLog:
    """Appends lines to `path` for a job of `world_size` processes. Raises OSError."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._path = path
        self._world_size = world_size
        self._job: JobStart | None = None

    def start(self, floating_point_operations: float, now: datetime) -> None:
        """Records the start of the job, with the FLOPs of earlier jobs."""
        self._job = JobStart(now, floating_point_operations)
        self._append(now, STARTING)

    def saved(self, iteration: int, floating_point_operations: float, tokens: int, now: datetime) -> None:
        """Records a saved checkpoint.

        The line has the throughput of this job, and of all jobs since the first with this number of processes; FLOPs
        and tokens are those of the whole run.
        """
        assert self._job is not None
        first = first_job(self._path.read_text(encoding="utf-8", errors="replace"), self._world_size) or self._job
        rates = [
            (floating_point_operations - since.floating_point_operations) / self._gpu_teraseconds(since.time, now)
            for since in (self._job, first)
        ]
        self._append(
            now,
            SAVED,
            f"Iteration: {iteration}",
            f"Job throughput: {rates[0]:.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {rates[1]:.1f} TFLOP/s/GPU",
            f"Floating-point operations: {floating_point_operations:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        )

    def _gpu_teraseconds(self, since: datetime, now: datetime) -> float:
        return max((now - since).total_seconds(), 1e-3) * self._world_size * 1e12  # clocks of two hosts may differ

    def _append(self, now: datetime, *columns: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        job = f"Job ID: {os.environ.get('SLURM_JOB_ID', '')}"
        line = "\t".join((f"{now:{_TIME}}", job, f"# GPUs: {self._world_size}", *columns))
        with open(self._path, "a", encoding="utf-8", opener=open_plain) as file:
            file.write(line + "\n")


def first_job(text: str, world_size: int) -> JobStart | None:
    """Returns the first of the last consecutive jobs in the file's text that have `world_size` processes."""
    saved, start = 0.0, None
    for line in text.splitlines():
        columns = line.split("\t")
        try:
            time, size, what = datetime.strptime(columns[0], _TIME), int(_value(columns[2])), columns[3]
            saved = float(_value(columns[7])) if what == SAVED else saved
        except (IndexError, ValueError):
            continue  # written by a version with other columns, or truncated
        if size != world_size:
            start = None
        elif what == STARTING and start is None:
            start = JobStart(time, saved)
    return start


def _value(column: str) -> str:
    return column.split(": ")[1]
