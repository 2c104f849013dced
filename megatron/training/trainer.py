"""The built objects of a run, and the two things they do: take steps, and evaluate."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.batch_schedule import BatchSchedule
from megatron.core.comm.collectives import all_reduce
from megatron.core.datasets.sample import Splits
from megatron.core.models.carried import CarriedTensors
from megatron.spec.sizes import Target
from megatron.training.background_save import BackgroundSave
from megatron.training.batch import BatchSource
from megatron.training.local_checkpoints import LocalCheckpoints
from megatron.training.result_check import ResultCheck
from megatron.training.state import StepReport, TrainState
from megatron.training.step import Objective, evaluate
from megatron.training.step_numbers import PendingStep, StepNumbers
from megatron.training.trained_model import TrainedModel


@dataclass(kw_only=True)
class Trainer(TrainedModel):
    """A model in training, with its data and progress. Callbacks read it; only steps change it.

    target: what decides about the memory of the kernels here, for the memory plan.
    carried: tensors that checkpoints hold and that are not trained.
    reads_late: the numbers of a step are read when the next one is under way, which lets the host run ahead of a
    device. stop_wanted: whether something asked this rank to stop, or None where nothing can. All ranks have it or
    none. Steps and evaluations ask it. sample_wanted: the same for what this rank finds remarkable about its last step;
    reports of steps tell it to all ranks. background_save: saves while training goes on; None if training waits for them.
    result_check: examines the numbers of a step before its update; None if nothing does.
    local_checkpoints: in the memory or on a disk of each host; None without them.
    """

    readers: Splits[BatchSource | None]
    state: TrainState
    target: Target
    carried: CarriedTensors
    # Consecutive steps up to now, without those skipped on request:
    bad_steps: int = 0  # whose gradients were not finite
    nan_steps: int = 0  # the same without those that lower fp16's loss scale
    reads_late: bool = False
    stop_wanted: Callable[[], bool] | None = None
    sample_wanted: Callable[[], bool] | None = None
    background_save: BackgroundSave | None = None
    result_check: ResultCheck | None = None
    local_checkpoints: LocalCheckpoints | None = None
    _pending: PendingStep | None = None  # the step that was queued last, until its numbers are read
    _reports: deque[StepReport] = field(default_factory=deque)
    _settled_at: float = 0.0  # when numbers were read last

    @property
    def batches(self) -> BatchSchedule:
        """Samples and microbatches of every step."""
        return self.settings.batches

    @property
    def total_iterations(self) -> int:
        """Steps of the whole run, those done before a resume included."""
        return self.batches.last_iteration(self.state.iteration, self.state.consumed_samples)

    @property
    def samples_left(self) -> int:
        """Samples that training still has to read."""
        return self.batches.samples_left(self.state.iteration, self.state.consumed_samples)

    @property
    def finished(self) -> bool:
        """Whether no step is left: all are done, the samples do not fill another, or nothing is trained."""
        if self.run.train.skip_train:
            return True
        samples, consumed = self.run.train.train_samples, self.state.consumed_samples
        if samples is None:
            return self.state.iteration >= self.batches.total_iterations
        return consumed + self.batches.global_batch_size(consumed) > samples

    def train_step(self) -> StepReport:
        """Runs one optimizer step and waits for its report."""
        self.queue_step()
        *_, report = self.reports(wait=True)
        return report

    def queue_step(self) -> None:
        """Queues one optimizer step on the next global batch; a step that is left out only reads its batch.

        The host reads the numbers of the step before on the way, and waits for nothing else (except for experts, see
        TrainStep.forward_backward, and for a `result_check`): [Note: one read per step] in step_numbers.py.
        """
        started, state = time.perf_counter(), self.state
        numbers: dict[str, Tensor] = {}
        objective = None
        with self.data_parallel.timeline.span("iteration", f"iteration {state.iteration + 1}"):
            samples = self.batches.global_batch_size(state.consumed_samples)
            assert self.readers.train is not None
            with self.timers("batch-generator", level=2), self.groups.heartbeat.phase("batch-generator"):
                microbatches = self.readers.train.read(self.batches.num_microbatches(state.consumed_samples))
            rows = sum(len(batch.tokens) for batch in microbatches) * self.groups.dp.size
            if state.iteration + 1 not in self.results.left_out:
                numbers["scale"] = self.optimizer.loss_scale.value
                if self.result_check is not None:
                    self.result_check.begin_step()
                objective = self.step.forward_backward(microbatches, state.iteration)
            self._settle()
            if objective is not None and self.result_check is not None:
                if not self.result_check.waits:
                    numbers["results"] = self.result_check.late_numbers(objective)
                else:
                    objective = self.result_check.examine(microbatches, samples, objective, state)
            if objective is not None:
                numbers |= self._update(objective)
            else:
                self.results.leave_out([state.iteration + 1])
            numbers |= self._agreed_flags()
            numbers["next scale"] = self.optimizer.loss_scale.value
            state.iteration += 1
            state.consumed_samples += samples
            timers, copies = self.timers.take(), StepNumbers(numbers)
            self._pending = PendingStep(
                state.iteration, samples, rows, state.consumed_samples, started, timers, objective, copies
            )
            if self.reads_late and not self.finished:
                with self.groups.heartbeat.phase("batch-generator"):
                    self.readers.train.read_ahead(self.batches.num_microbatches(state.consumed_samples))

    def reports(self, *, wait: bool) -> Iterator[StepReport]:
        """Yields the reports of steps that are known and were not yielded before, in order;
        with `wait` of all steps."""
        while self._reports or (wait and self._pending):
            if not self._reports:
                self._settle()
            yield self._reports.popleft()

    def evaluate(self, reader: BatchSource) -> float | None:
        """Returns the mean loss per token over --eval-iters global batches of `reader`; None if a rank shall stop."""
        microbatches = self.batches.final_num_microbatches
        iterations = self.run.eval.eval_iters
        with self.groups.heartbeat.phase("evaluate"):
            loss = evaluate(
                self.model,
                lambda: reader.read(microbatches),
                iterations,
                self.groups,
                self.settings.pipeline,
                self.stop_wanted,
            )
        if self.step.features.fp8 is not None:
            self.step.features.fp8.forget()
        return loss

    def close(self) -> None:
        """Ends the processes that load data, which would hold up the end of this one: they ignore SIGTERM. No step and
        no evaluation can follow."""
        for _, reader in self.readers.items():
            if reader is not None:
                reader.close()

    def _agreed_flags(self) -> dict[str, Tensor]:
        """Returns the largest value of any rank of what the ranks act upon together.
        Communication: one all-reduce over the world, unless nothing can stop the run, nothing looks for slow ranks and
        no save is pending."""
        flags = {}
        if self.stop_wanted is not None:
            flags["stop"] = float(self.stop_wanted())
        if self.sample_wanted is not None:
            flags["sample"] = float(self.sample_wanted())
        if self.background_save is not None and self.background_save.remaining is not None:
            flags["save"] = float(self.background_save.remaining)
        if not flags:
            return {}
        local = torch.cat([torch.full((1,), value, device=self.device) for value in flags.values()])
        return dict(zip(flags, all_reduce(local, self.groups.world, "max").split(1), strict=True))

    def _update(self, objective: Objective) -> dict[str, Tensor]:
        """Updates parameters and the biases of experts. Returns what the host wants to know about the step."""
        position = self.state.schedule_position
        if self.data_parallel.before_write is not None:
            self.data_parallel.before_write()
        update = self.step.update(
            self.schedule.learning_rate(position),
            self.schedule.weight_decay(position),
            self.schedule.decoupled_learning_rate(position),
        )
        numbers = {"objective": objective.numbers, "norm": update.grad_norm, "applied": update.applied}
        if update.num_zeros is not None:
            numbers["zeros"] = update.num_zeros
        if self.step.features.experts is not None:
            numbers["experts"] = self.step.features.experts.update_biases(applied=update.applied)
        if self.run.logging.log_params_norm:
            numbers["params norm"] = self.optimizer.params_norm()
        return numbers

    def _settle(self) -> None:
        """Reads the numbers of the step that was queued last, and brings the state up to date with it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self.groups.heartbeat.phase("read-step"):
            numbers = pending.numbers.read()
        state, run, experts = self.state, self.run, self.step.features.experts
        loss, norm, applied, skipped, nan = None, 0.0, False, True, False
        further: list[float | None] = []
        if pending.objective is not None:
            pending.objective.value(numbers["objective"])
            (loss, *further), (norm,) = pending.objective.means(numbers["objective"]), numbers["norm"]
            applied = bool(numbers["applied"][0])
            self.optimizer.settle(applied=applied)
            skipped, nan = self._why_not_applied(applied, norm, numbers["scale"][0])
            if self.result_check is not None and "results" in numbers:
                self.result_check.report(pending.iteration, numbers["results"])
        if not (skipped or nan):
            state.schedule_position += pending.samples if run.train.train_samples else 1
        state.skipped_iterations += skipped
        state.nan_iterations += nan
        now = time.perf_counter()
        seconds, self._settled_at = now - max(pending.started, self._settled_at), now
        self._reports.append(
            StepReport(
                iteration=pending.iteration,
                loss=math.nan if loss is None else loss,
                has_labels=loss is not None or pending.objective is None,
                further_losses=tuple(math.nan if mean is None else mean for mean in further),
                grad_norm=norm,
                loss_scale=numbers["next scale"][0],
                learning_rate=self.schedule.learning_rate(state.schedule_position),
                global_batch_size=pending.samples,
                tokens=pending.rows * (run.data.seq_length or 0),
                packed_rows=pending.rows,
                consumed_samples=pending.consumed_samples,
                seconds=seconds,
                skipped=skipped,
                nan=nan,
                num_zeros=int(numbers["zeros"][0]) if applied and "zeros" in numbers else None,
                params_norm=numbers["params norm"][0] if "params norm" in numbers else None,
                experts=experts.report(numbers["experts"]) if experts and "experts" in numbers else None,
                timers=pending.timers,
                stop_wanted="stop" in numbers and bool(numbers["stop"][0]),
                sample_wanted="sample" in numbers and bool(numbers["sample"][0]),
                save_remaining=int(numbers["save"][0]) if "save" in numbers else None,
            )
        )

    def _why_not_applied(self, applied: bool, norm: float, scale: float) -> tuple[bool, bool]:
        """(skipped because the loss scale, `scale` in this step, was too large; left out because of a NaN).

        Both are False for an update that was `applied`. Counts the steps whose gradients were not finite.
        """
        # A scale at its floor has nothing left to lower: then it is no overflow but a NaN.
        overflow = self.optimizer.loss_scale.dynamic and scale > self.run.optimizer.min_loss_scale
        is_bad = not math.isfinite(norm)
        self.bad_steps = self.bad_steps + 1 if is_bad else 0
        self.nan_steps = self.nan_steps + 1 if is_bad and not overflow else 0
        return overflow and not applied, not (overflow or applied)
