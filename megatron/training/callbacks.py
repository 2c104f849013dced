"""Callbacks of the training loop: logging, evaluation, checkpoints, exits, garbage collection."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.core.comm.collectives import gather_objects
from megatron.core.device import memory_report, peak_tflops
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.local_save import LocalSave
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.spec.decoder import decoder_spec
from megatron.spec.flops import train_flops
from megatron.training.background_save import BackgroundSave
from megatron.training.checkpoint import begin_local_save, begin_save, finish_save, save_checkpoint
from megatron.training.export import complete_exports, save_hf
from megatron.training.logging.footprint import memory_line
from megatron.training.logging.line import (
    LogLine,
    LogWindow,
    format_background_save,
    format_evaluation,
    format_experts,
    format_line,
)
from megatron.training.logging.loss_curve import draw_loss_curve
from megatron.training.logging.progress import ProgressLine
from megatron.training.logging.progress_log import ProgressLog
from megatron.training.logging.timed_phase import timed_phase
from megatron.training.logging.timers import format_timers, slowest
from megatron.training.logging.writers import Metrics
from megatron.training.loop import Callback
from megatron.training.signals import SAVING, StopRelay, StopRequest
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

log = get_logger(__name__)


class Curves:
    """Losses of this run for the picture of --loss-curve."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []


class Log(Callback):
    """The log line, metrics, timers, memory reports and the progress line."""

    def __init__(self, metrics: Metrics, curves: Curves, progress: ProgressLine) -> None:
        self._metrics, self._curves, self._progress = metrics, curves, progress
        self._timers: dict[str, float] = {}
        self._reported_memory = False

    def start(self, trainer: Trainer) -> None:
        """Starts counting; logs if the run is already complete."""
        run, state = trainer.run, trainer.state
        seq_length = run.data.seq_length or 0
        self._flops = train_flops(decoder_spec(run.model), seq_length, 1)
        peak = peak_tflops(trainer.device, next(trainer.model.parameters()).dtype)
        self._window = LogWindow(self._flops, trainer.groups.world.size, peak)
        self._total_iterations = trainer.total_iterations
        self._total_samples = state.consumed_samples + trainer.samples_left
        trainer.timers.take()
        if trainer.finished and not run.train.skip_train:
            log.info("nothing is left to train: iteration %d of %d is done", state.iteration, self._total_iterations)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Collect; print a line every --log-interval steps."""
        state, config = trainer.state, trainer.run.logging
        state.floating_point_operations += self._flops * report.rows
        self._window.add(report)
        for name, seconds in report.timers.items():
            self._timers[name] = self._timers.get(name, 0.0) + seconds
        self._metrics.step(report, report.consumed_samples, trainer.groups.world.size)
        self._curves.train.append((report.iteration, report.loss))
        if report.nan and trainer.groups.rank == 0:
            log.warning(
                "iteration %d: gradients are not finite (norm %s); the step was skipped",
                report.iteration,
                report.grad_norm,
            )
        if not report.has_labels and trainer.groups.rank == 0:
            log.warning(
                "iteration %d: all labels of its %d samples are masked, so it has no loss and nothing to learn",
                report.iteration,
                report.global_batch_size,
            )
        left = self._total_samples - report.consumed_samples
        self._progress.update(
            report.iteration,
            report.loss,
            report.tokens / report.seconds,
            left * report.seconds / report.global_batch_size,
        )
        if report.iteration % config.log_interval == 0:
            self._print_line(trainer, report, left)
        every = config.log_memory_interval
        first = not self._reported_memory and report.iteration % config.log_interval == 0
        if first or (every and report.iteration % every == 0):
            self._print_memory(trainer, report)

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Close the metric writers; draw the loss curve."""
        self._metrics.close()
        path = trainer.run.logging.loss_curve
        if path and trainer.groups.rank == 0:
            try:
                draw_loss_curve(Path(path), self._curves.train, self._curves.validation)
            except OSError as error:  # the run itself is done and saved
                log.warning("--loss-curve %s could not be written: %s", path, error.strerror)

    def _print_line(self, trainer: Trainer, report: StepReport, samples_left: int) -> None:
        line: LogLine = self._window.close(
            consumed_samples=report.consumed_samples,
            train_iters=self._total_iterations,
            remaining_samples=samples_left,
            peak_memory=memory_report(trainer.device).peak_allocated,
        )
        log.info(format_line(line, datetime.now(), trainer.run.logging.log_throughput))
        if trainer.run.moe.moe_per_layer_logging and line.experts is not None:
            log.info(format_experts(line.experts))
        ranks: list[dict[str, float]] = []
        if trainer.run.logging.timing_log_level > 0:
            taken, self._timers = self._timers, {}
            ranks = gather_objects(taken, trainer.groups.world)
            if block := format_timers(ranks, trainer.run.logging.log_interval):
                log.info(block)
        self._metrics.line(line, slowest(ranks, trainer.run.logging.log_interval))

    def _print_memory(self, trainer: Trainer, report: StepReport) -> None:
        self._reported_memory = True
        line = memory_line(trainer.groups.rank, report.iteration, trainer.device)
        for text in gather_objects(line, trainer.groups.world):
            log.info(text)


class Evaluate(Callback):
    """Validation loss every --eval-interval steps and after training, then the test loss."""

    def __init__(self, metrics: Metrics, curves: Curves, stop: StopRequest) -> None:
        self._metrics, self._curves, self._stop = metrics, curves, stop
        self._evaluated_at = -1

    def is_due(self, trainer: Trainer) -> bool:
        """When the interval is full."""
        return is_multiple(trainer.state.iteration, trainer.run.eval.eval_interval)

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """Evaluate when the interval is full. The reason to stop, if something asked for that meanwhile."""
        if is_multiple(report.iteration, trainer.run.eval.eval_interval):
            return self._validate(trainer, f"iteration {report.iteration}")
        return None

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Final validation (unless just done) and test; not if stopped early, which has no time for it."""
        if reason is not None:
            return
        iteration = trainer.state.iteration
        if self._evaluated_at != iteration and self._validate(trainer, f"iteration {iteration} on validation set"):
            return
        if trainer.readers.test is not None:
            loss = trainer.evaluate(trainer.readers.test)
            if loss is None:
                self._say_stopped(trainer, iteration)
            else:
                log.info(format_evaluation(f"iteration {iteration} on test set", loss))

    def _say_stopped(self, trainer: Trainer, iteration: int) -> str | None:
        reason = self._stop.agreed(trainer.groups.world)
        log.info("evaluation after iteration %d was stopped: %s", iteration, reason)
        return reason

    def _validate(self, trainer: Trainer, where: str) -> str | None:
        state = trainer.state
        if trainer.readers.valid is None:
            return None
        loss = trainer.evaluate(trainer.readers.valid)
        if loss is None:
            return self._say_stopped(trainer, state.iteration)
        state.consumed_valid_samples += trainer.run.eval.eval_iters * trainer.batches.final_global_batch_size
        self._evaluated_at = state.iteration
        log.info(format_evaluation(where, loss))
        self._metrics.evaluation(state.iteration, state.consumed_samples, loss)
        self._curves.validation.append((state.iteration, loss))
        return None


class Checkpoint(Callback):
    """Saves every --save-interval steps, when the run is stopped, and at its end.

    With --async-save the saves between go on while the run trains, and end after a later step: when all ranks have
    written, or when the next save or the end of the run waits for it.

    It does not save while gradients are not finite: the weights may be damaged, and each save may delete an older good
    checkpoint. A save that is due then follows the next good step.

    Local checkpoints (--non-persistent-save-interval) are saved in the same way, always in the background. Where both
    are due, and while one that persists is being written, there is no local one.
    """

    def __init__(self, stop: StopRequest, check: Callable[[Trainer], None]) -> None:
        """check: called before each save on all ranks; raises on all of them what forbids it."""
        self._stop, self._check = stop, check
        self._saved_at = -1
        self._is_due = False
        self._progress: ProgressLog | None = None
        self._line: Callable[[ProgressLog], None] = lambda file: None  # of the pending save

    def start(self, trainer: Trainer) -> None:
        """Marks the loaded checkpoint as saved, and completes its export if a killed run has not."""
        config, local = trainer.run.checkpoint, trainer.local_checkpoints
        # The local checkpoint from which a run goes on is deleted at its end: one that persists has to take its place.
        self._saved_at = trainer.state.iteration if local is None or local.complete is None else -1
        if local is not None:
            local.start()
            if trainer.carried.tensors and trainer.groups.rank == 0:
                log.warning("no local checkpoints are saved: they cannot hold the tensors that this run does not train")
        if trainer.run.logging.log_progress and config.save and trainer.groups.rank == 0:
            self._progress = ProgressLog(Path(config.save) / "progress.txt", trainer.groups.world.size)
        self._write_progress(lambda file: file.start(trainer.state.floating_point_operations, datetime.now()))
        if trainer.run.checkpoint.save_hf:
            with trainer.groups.heartbeat.phase(SAVING):
                complete_exports(trainer)

    def is_due(self, trainer: Trainer) -> bool:
        """When the interval is full, and until a save that is due has followed."""
        config, iteration = trainer.run.checkpoint, trainer.state.iteration
        is_full = bool(config.save and is_multiple(iteration, config.save_interval))
        return self._is_due or is_full or _is_local_due(trainer, iteration)

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """Save when the interval is full. The reason to stop, if something asked for that meanwhile."""
        config, background = trainer.run.checkpoint, trainer.background_save
        if background is not None and background.pending is not None and report.save_remaining is not None:
            self._advance(trainer, background, report.save_remaining)
        if config.save and is_multiple(report.iteration, config.save_interval):
            self._is_due = True
            if trainer.bad_steps and trainer.groups.rank == 0:
                log.warning("iteration %d: not saved, as gradients are not finite", report.iteration)
        if trainer.bad_steps:
            return None
        if not self._is_due:
            self._save_locally(trainer)
            return None
        self._save(trainer)
        return self._stop.agreed(trainer.groups.world) if config.save else None

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Save what is not saved yet; after a bad step without deleting older checkpoints."""
        self._finish(trainer, last=self._saved_at == trainer.state.iteration)
        if self._saved_at != trainer.state.iteration:
            self._save(trainer, prune=not trainer.bad_steps, last=True)
        if trainer.local_checkpoints is not None:
            trainer.local_checkpoints.end()

    def fail(self, trainer: Trainer) -> None:
        """Completes a save that was begun before the error, and saves where the run shall go on from this step."""
        try:
            self._finish(trainer, last=True)
            if trainer.result_check is not None and trainer.result_check.saves:
                self._save(trainer, prune=False, last=True)
        except CheckpointError as error:  # the error that ends the run is reported as such
            log.warning("%s", error)

    def _save(self, trainer: Trainer, *, prune: bool = True, last: bool = False) -> None:
        self._is_due = False
        if not trainer.run.checkpoint.save:
            return
        self._finish(trainer, last=False)
        self._check(trainer)
        state, line = trainer.state, self._progress_line(trainer)
        with self._tolerating_failure(trainer, last=last), timed_phase(SAVING, trainer.groups):
            if trainer.background_save is not None and trainer.run.checkpoint.async_save and not last:
                trainer.background_save.begin(functools.partial(begin_save, trainer, prune=prune))
                self._saved_at, self._line = state.iteration, line
            else:
                path = save_checkpoint(trainer, prune=prune)
                self._saved_at = state.iteration
                self._published(trainer, path, line)

    def _save_locally(self, trainer: Trainer) -> None:
        """Begins to save a local checkpoint if one is due."""
        background = trainer.background_save
        if background is None or not _is_local_due(trainer, trainer.state.iteration):
            return
        if background.pending is not None and not isinstance(background.pending, LocalSave):
            return
        self._finish(trainer, last=False)
        self._check(trainer)
        with self._tolerating_failure(trainer, last=False, local=True), trainer.groups.heartbeat.phase(SAVING):
            background.begin(functools.partial(begin_local_save, trainer))

    def _advance(self, trainer: Trainer, background: BackgroundSave, remaining: int) -> None:
        """Goes on with the pending save. remaining: see StepReport."""
        is_over, local = False, isinstance(background.pending, LocalSave)
        with self._tolerating_failure(trainer, last=False, local=local), trainer.groups.heartbeat.phase(SAVING):
            is_over = background.advance(remaining)
        if is_over:
            self._finish(trainer, last=False)

    def _finish(self, trainer: Trainer, *, last: bool) -> None:
        """Waits for the pending save, if there is one. last: no save follows it."""
        background = trainer.background_save
        if background is None or background.pending is None:
            return
        if isinstance(background.pending, LocalSave):
            self._finish_locally(trainer, background)
            return
        with self._tolerating_failure(trainer, last=last), trainer.groups.heartbeat.phase(SAVING):
            path = background.finish(functools.partial(finish_save, trainer))
            log.info(format_background_save(path.name, *background.close(trainer.groups.world)))
            self._published(trainer, path, self._line)

    def _finish_locally(self, trainer: Trainer, background: BackgroundSave) -> None:
        """Waits for the pending save of a local checkpoint, which then takes the place of the one before."""
        local = trainer.local_checkpoints
        assert local is not None and background.pending is not None
        iteration = background.pending.iteration
        with self._tolerating_failure(trainer, last=False, local=True), trainer.groups.heartbeat.phase(SAVING):
            path = background.finish(PendingSave.finish)
            local.complete = iteration
            price = background.close(trainer.groups.world)
            log.info(format_background_save(path.name, *price, place=local.words))

    def _published(self, trainer: Trainer, path: Path, line: Callable[[ProgressLog], None]) -> None:
        """Writes what follows a checkpoint: its export, and its line of progress.txt."""
        if trainer.run.checkpoint.save_hf:
            save_hf(trainer, path)
        self._write_progress(line)

    @contextlib.contextmanager
    def _tolerating_failure(self, trainer: Trainer, *, last: bool, local: bool = False) -> Iterator[None]:
        """Turns the failure of a save in the body into a warning, if the run may go on without that checkpoint. It may
        always go on without a local one."""
        config, heartbeat = trainer.run.checkpoint, trainer.groups.heartbeat
        phase = heartbeat.current_phase
        try:
            yield
        except CheckpointError as error:
            if not local and (last or config.ckpt_failure == "stop" or not self._has_earlier(trainer)):
                raise
            heartbeat.move_to(phase)
            if trainer.groups.rank == 0:
                advice = (
                    "the next local save tries again" if local else "the next save tries again (--ckpt-failure warn)"
                )
                log.warning("%s. Training goes on, and %s", error, advice)

    def _progress_line(self, trainer: Trainer) -> Callable[[ProgressLog], None]:
        """Returns what writes the line of a checkpoint of this moment."""
        state, seq_length = trainer.state, trainer.run.data.seq_length or 0
        iteration, operations, tokens = (
            state.iteration,
            state.floating_point_operations,
            state.consumed_samples * seq_length,
        )
        return lambda file: file.saved(iteration, operations, tokens, datetime.now())

    def _has_earlier(self, trainer: Trainer) -> bool:
        """Whether --save holds a checkpoint, as the first rank sees it. Communication: a gather of a flag."""

        def look() -> bool:
            try:
                return find(Path(trainer.run.checkpoint.save or ""), None) is not None
            except (OSError, CheckpointError):
                return False

        return bool(gather_objects(look(), trainer.groups.world)[0])

    def _write_progress(self, write: Callable[[ProgressLog], None]) -> None:
        if self._progress is None:
            return
        try:
            write(self._progress)
        except OSError as error:  # a missing line does not end the run
            log.warning("progress.txt in --save could not be written: %s", error.strerror)


class Exit(Callback):
    """Stops the run at --exit-interval, after --exit-duration-in-mins, or on SIGTERM and SIGUSR1."""

    def __init__(self, stop: StopRequest, relay: StopRelay) -> None:
        self._stop, self._relay = stop, relay

    def start(self, trainer: Trainer) -> None:
        """Ends set-up. From now on the steps of the trainer ask all ranks whether one of them shall stop."""
        self._relay.close(trainer.groups.world)

    def is_due(self, trainer: Trainer) -> bool:
        """When the interval is full."""
        return is_multiple(trainer.state.iteration, trainer.run.train.exit_interval)

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """The reason to stop, agreed between all ranks."""
        interval = trainer.run.train.exit_interval
        if is_multiple(report.iteration, interval):
            return f"--exit-interval {interval}"
        return self._stop.agreed(trainer.groups.world) if report.stop_wanted else None


class GarbageCollection(Callback):
    """With --manual-gc: no automatic collection, one every --manual-gc-interval steps on all ranks at once.

    Ranks that collect at different steps make all others wait for them.
    """

    def start(self, trainer: Trainer) -> None:
        """Switch the automatic collection off."""
        gc.disable()
        gc.collect()

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Collect when the interval is full."""
        if is_multiple(report.iteration, trainer.run.train.manual_gc_interval):
            gc.collect()

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Switch it on again."""
        gc.enable()


def _is_local_due(trainer: Trainer, iteration: int) -> bool:
    """Returns whether the interval of local checkpoints is full."""
    interval = trainer.run.checkpoint.non_persistent_save_interval
    return trainer.local_checkpoints is not None and not trainer.carried.tensors and is_multiple(iteration, interval)


def is_multiple(iteration: int, interval: int | None) -> bool:
    """Returns whether an interval is full; one of None or 0 never is."""
    return bool(interval and iteration % interval == 0)
