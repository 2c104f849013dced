"""The training loop. Features are attached as callbacks, in the order of set-up."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import TrainingError
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer


class Callback:
    """An activity that accompanies training. Every rank runs every callback: they may communicate."""

    def start(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def before_step(self, trainer: Trainer) -> None:
        """Called before each step is queued. On CUDA `after_step` of the step before may still follow."""

    def is_due(self, trainer: Trainer) -> bool:
        """Whether `after_step` of the step that was just queued has to be called before the next one is, because it
        needs the run's state of that moment. The same on all ranks."""
        return False

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """Called for every step, in order, when its numbers are known. On CUDA the next step may be under way by then:
        [Note: one read per step] in step_numbers.py. A returned string is a reason to stop now; it is the same on all
        ranks."""
        return None

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Called after the last step, in reverse order; `reason` is why the run was stopped early, or None."""

    def fail(self, trainer: Trainer) -> None:
        """Called in place of `end` when a TrainingError, which all ranks raise at the same step, ends the run."""


def fit(trainer: Trainer, callbacks: Sequence[Callback]) -> str | None:
    """Trains to the end of the run or until a callback stops it; returns the reason, None at the planned end."""
    for callback in callbacks:
        callback.start(trainer)
    reason = None
    trainer.model.train()
    try:
        while not trainer.finished and reason is None:
            for callback in callbacks:
                callback.before_step(trainer)
            trainer.queue_step()
            wait = not trainer.reads_late or any(callback.is_due(trainer) for callback in callbacks)
            reason = _after_steps(trainer, callbacks, wait=wait)
        reason = _after_steps(trainer, callbacks, wait=True) or reason
        trainer.data_parallel.synchronize()  # the last step's parameters may still be in flight
        for callback in reversed(callbacks):
            callback.end(trainer, reason)
    except TrainingError:
        for callback in callbacks:
            callback.fail(trainer)
        raise
    return reason


def _after_steps(trainer: Trainer, callbacks: Sequence[Callback], *, wait: bool) -> str | None:
    """Calls the callbacks for the steps whose numbers are known; with `wait` for all steps."""
    reason = None
    for report in trainer.reports(wait=wait):
        for callback in callbacks:
            reason = callback.after_step(trainer, report) or reason
    return reason
