"""The training loop. Features are attached as callbacks, in the order of set-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.training.state import StepReport
from megatron.training.trainer import Trainer


class Callback(Protocol):
    """An activity that accompanies training. Every rank runs every callback: they may communicate."""

    def start(self, trainer: Trainer) -> None:
        """Called before the first step."""
        ...

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """Called after each step. A returned string is a reason to stop now; it is the same on all ranks."""
        ...

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Called after the last step, in reverse order; `reason` is why the run was stopped early, or None."""
        ...


def fit(trainer: Trainer, callbacks: Sequence[Callback]) -> str | None:
    """Trains to the end of the run or until a callback stops it; returns the reason, None at the planned end."""
    for callback in callbacks:
        callback.start(trainer)
    reason = None
    trainer.model.train()
    while not trainer.finished and reason is None:
        report = trainer.train_step()
        for callback in callbacks:
            reason = callback.after_step(trainer, report) or reason
    trainer.data_parallel.synchronize()  # the last step's parameters may still be in flight
    for callback in reversed(callbacks):
        callback.end(trainer, reason)
    return reason
