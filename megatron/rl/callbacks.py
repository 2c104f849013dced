"""Log lines, metrics and files of rollouts and of pairs, and the evaluation on held-out prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from megatron.base.log import get_logger
from megatron.rl.best import BestEvaluation
from megatron.rl.learner import RolloutReader, RolloutReport
from megatron.rl.pages import write_rollout
from megatron.rl.preference_reader import PreferenceReader
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


class EvaluateHeldOut(Callback, ABC):
    """Evaluates data that is not trained on before the first step, every --eval-interval steps, and at the end."""

    def __init__(self, metrics: Metrics, *, subject: str, tag: str, best: str) -> None:
        """subject: what is counted in the log line. tag: before the names of metrics. best: the figure that chooses the
        best checkpoint; more is better."""
        self._metrics, self._subject, self._tag, self._best_figure = metrics, subject, tag, best
        self._evaluated_at = -1
        self._best: BestEvaluation | None = None  # on the first rank of a run that saves

    def start(self, trainer: Trainer) -> None:
        """Evaluate the weights with which the run begins."""
        save = trainer.run.checkpoint.save
        if save is not None and trainer.groups.rank == 0:
            self._best = BestEvaluation(Path(save), self._best_figure, trainer.state.iteration)
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

    @abstractmethod
    def figures(self, trainer: Trainer) -> tuple[dict[str, float], int]:
        """Returns figures of the data by name, and how much of it there is."""

    def _evaluate(self, trainer: Trainer) -> None:
        self._evaluated_at = trainer.state.iteration
        numbers, count = self.figures(trainer)
        if self._best is not None:
            self._best.add(trainer.state.iteration, numbers[self._best_figure])
        log.info(
            "evaluation at iteration %d | %s | %d %s",
            trainer.state.iteration,
            format_figures(numbers),
            count,
            self._subject,
        )
        tagged = {f"{self._tag}/{name}": value for name, value in numbers.items()}
        self._metrics.rollout(trainer.state.iteration, trainer.state.consumed_samples, tagged)


class EvaluatePairs(EvaluateHeldOut):
    """Compares --eval-preference-data with the reference."""

    def __init__(self, reader: PreferenceReader, metrics: Metrics) -> None:
        super().__init__(metrics, subject="pairs", tag="dpo-evaluation", best="accuracy")
        self._reader = reader

    def figures(self, trainer: Trainer) -> tuple[dict[str, float], int]:
        """Returns the loss, the rewards, their margin and the accuracy, and the number of pairs."""
        assert self._reader.held_out is not None
        return self._reader.evaluate(), len(self._reader.held_out)


class EvaluateAnswers(EvaluateHeldOut):
    """Answers --eval-prompt-data greedily."""

    def __init__(self, reader: RolloutReader, metrics: Metrics) -> None:
        super().__init__(metrics, subject="prompts", tag="rl-evaluation", best="reward")
        self._rollouts, self._held_out = reader.rollouts, reader.held_out

    def figures(self, trainer: Trainer) -> tuple[dict[str, float], int]:
        """Returns the means of rewards, of exact answers and of lengths, and the number of prompts."""
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
        return numbers, len(answers)


def format_figures(numbers: Mapping[str, float]) -> str:
    """Returns the figures of a log line."""
    return " | ".join(f"{name}: {value:.6g}" for name, value in numbers.items())
