"""Log lines, metrics and files of rollouts and of pairs, and the evaluation on held-out prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from megatron.base.log import get_logger
from megatron.rl.best import BestEvaluation
from megatron.rl.learner import RolloutReader, RolloutReport
from megatron.rl.pages import write_rollout
from megatron.rl.report import LearningReport
from megatron.rl.sampler import GREEDY
from megatron.training.callbacks import is_multiple
from megatron.training.logging.writers import Metrics
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

_Report = TypeVar("_Report", bound=LearningReport)
log = get_logger(__name__)
# A reward of at least this is counted as that of a right answer.
EXACT = 1.0


class LogReports(Callback, Generic[_Report]):
    """Prints a line for each report, and passes its figures to the writers of metrics."""

    def __init__(self, reports: deque[_Report], metrics: Metrics, *, subject: str, tag: str) -> None:
        """reports: are taken from here. subject: of the lines. tag: before the names of metrics."""
        self._reports, self._metrics, self._subject, self._tag = reports, metrics, subject, tag

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Log the reports whose last step is done."""
        while self._reports and self._reports[0].last_iteration <= report.iteration:
            done = self._reports.popleft()
            if trainer.groups.rank == 0:
                log.info("%s %d | %s", self._subject, done.iteration + 1, format_figures(done.numbers))
                tagged = {f"{self._tag}/{name}": value for name, value in done.numbers.items()}
                self._metrics.rollout(report.iteration, report.consumed_samples, tagged)
                self.write(trainer, done)

    def write(self, trainer: Trainer, report: _Report) -> None:
        """Write further files about a report, on rank 0. There are none."""


class LogRollouts(LogReports[RolloutReport]):
    """Also writes --save-rollouts."""

    def __init__(self, reader: RolloutReader, metrics: Metrics) -> None:
        super().__init__(reader.reports, metrics, subject="rollout before step", tag="rl")
        self._rollouts = reader.rollouts

    def write(self, trainer: Trainer, report: RolloutReport) -> None:
        """Write the answers of the rollout."""
        folder, groups = trainer.run.rl.save_rollouts, report.rollout.groups
        if folder is None:
            return
        try:
            write_rollout(Path(folder), report.iteration, groups, [self._rollouts.prompt_of(group) for group in groups])
        except OSError as error:  # training does not need them
            log.warning("--save-rollouts %s could not be written: %s", folder, error.strerror)


class EvaluateAnswers(Callback):
    """Answers --eval-prompt-data greedily before the first step, every --eval-interval steps, and at the end."""

    def __init__(self, reader: RolloutReader, metrics: Metrics) -> None:
        self._rollouts, self._held_out, self._metrics = reader.rollouts, reader.held_out, metrics
        self._evaluated_at = -1
        self._best: BestEvaluation | None = None  # on the first rank of a run that saves

    def start(self, trainer: Trainer) -> None:
        """Evaluate the weights with which the run begins."""
        save = trainer.run.checkpoint.save
        if save is not None and trainer.groups.rank == 0:
            self._best = BestEvaluation(Path(save), "reward", trainer.state.iteration)
        self._evaluate(trainer)

    def is_due(self, trainer: Trainer) -> bool:
        """When the interval is full."""
        return is_multiple(trainer.state.iteration, trainer.run.eval.eval_interval)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Evaluate when the interval is full."""
        self._settle_best()
        if is_multiple(report.iteration, trainer.run.eval.eval_interval):
            self._evaluate(trainer)

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Evaluate the last weights, which are saved by now, unless the run was stopped."""
        self._settle_best()
        if reason is None and self._evaluated_at != trainer.state.iteration:
            self._evaluate(trainer)
            self._settle_best()

    def _settle_best(self) -> None:
        if self._best is not None:
            self._best.settle()

    def _evaluate(self, trainer: Trainer) -> None:
        self._evaluated_at = trainer.state.iteration
        assert self._held_out is not None
        count = min(len(self._held_out), trainer.run.rl.eval_prompts or len(self._held_out))
        prompts = [(number, self._held_out.at(number)) for number in range(count)]
        groups = self._rollouts.answers(prompts, 1, {}, GREEDY)
        answers = [answer for group in groups for answer in group]
        numbers = {
            "reward": sum(answer.reward for answer in answers) / len(answers),
            "exact": sum(answer.reward >= EXACT for answer in answers) / len(answers),
            "answer length": sum(len(answer.trained) for answer in answers) / len(answers),
        }
        log.info(
            "evaluation at iteration %d | %s | %d prompts",
            trainer.state.iteration,
            format_figures(numbers),
            len(answers),
        )
        tagged = {f"rl-evaluation/{name}": value for name, value in numbers.items()}
        self._metrics.rollout(trainer.state.iteration, trainer.state.consumed_samples, tagged)
        if self._best is not None:
            self._best.add(trainer.state.iteration, numbers["reward"])


def format_figures(numbers: Mapping[str, float]) -> str:
    """Returns the figures of a log line."""
    return " | ".join(f"{name}: {value:.6g}" for name, value in numbers.items())
