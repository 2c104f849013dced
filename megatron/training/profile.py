"""--profile-timeline: a Chrome trace of some steps, and a summary of the time of each."""

from __future__ import annotations

from pathlib import Path

from megatron.base.heartbeat import unmeasured
from megatron.base.log import get_logger
from megatron.core.comm.collectives import barrier, gather_objects
from megatron.core.device import synchronize
from megatron.core.timeline import write_chrome_trace
from megatron.training.logging.step_summary import WAIT, format_summary, summarize
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

log = get_logger(__name__)


class ProfileTimeline(Callback):
    """Records some steps of every rank, writes them as a Chrome trace and logs a summary of each."""

    def __init__(self) -> None:
        self._first = 0  # the last iteration before this run of the program
        self._recording = False

    def start(self, trainer: Trainer) -> None:
        """The first step may be one of them."""
        self._first = trainer.state.iteration
        self._begin_if_next(trainer, 1)

    def is_due(self, trainer: Trainer) -> bool:
        """Before the first step of the range, and after its last one."""
        logging, following = trainer.run.logging, trainer.state.iteration + 1 - self._first
        return following == logging.profile_step_start or (self._recording and following >= logging.profile_step_end)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Begin before the first step of the range, write after its last one."""
        following = report.iteration + 1 - self._first
        if self._recording and following >= trainer.run.logging.profile_step_end:
            self._write(trainer)
        self._begin_if_next(trainer, following)

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Write what there is of a run that was shorter."""
        if self._recording:
            self._write(trainer)

    def _begin_if_next(self, trainer: Trainer, following: int) -> None:
        """following: the number of the next step in this run of the program, from 1."""
        if following == trainer.run.logging.profile_step_start:
            synchronize(trainer.device)
            barrier(trainer.groups.world)
            timeline = trainer.data_parallel.timeline
            timeline.start()
            trainer.groups.heartbeat.during_wait = lambda op, group: timeline.span(f"{WAIT}{group}", op)
            self._recording = True

    def _write(self, trainer: Trainer) -> None:
        self._recording = False
        trainer.data_parallel.synchronize()
        ranks = gather_objects(trainer.data_parallel.timeline.stop(), trainer.groups.world)
        trainer.groups.heartbeat.during_wait = unmeasured
        if trainer.groups.rank == 0:
            for summary in summarize(ranks):
                log.info("%s", format_summary(summary))
            path = Path(trainer.run.logging.profile_timeline or "")
            try:
                write_chrome_trace(path, ranks)
                log.info("timeline of %d ranks written to %s (open it in https://ui.perfetto.dev)", len(ranks), path)
            except OSError as error:  # the run goes on
                log.warning("--profile-timeline %s could not be written: %s", path, error.strerror)
