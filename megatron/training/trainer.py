"""The built objects of a run, and the two things they do: take one step, and evaluate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from megatron.config.batch_schedule import BatchSchedule
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.core.comm.collectives import all_reduce
from megatron.core.datasets.sample import Splits
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer, Update
from megatron.core.parameter import Parameter
from megatron.core.tensor_parallel.random import RngTracker
from megatron.training.batch import BatchReader
from megatron.training.logging.timers import Timers
from megatron.training.state import StepReport, TrainState
from megatron.training.step import TrainStep, evaluate


@dataclass
class Trainer:
    """Everything set-up built. Callbacks read it; only `train_step` and loading a checkpoint change it."""

    run: RunConfig
    settings: RunSettings
    groups: Groups
    device: torch.device
    model: GPTModel
    parameters: dict[str, Parameter]
    data_parallel: DataParallel
    optimizer: Optimizer
    rng: RngTracker
    schedule: ParamSchedule
    readers: Splits[BatchReader | None]
    timers: Timers
    state: TrainState
    step: TrainStep
    # Consecutive steps up to now, without those skipped on request:
    bad_steps: int = 0  # whose gradients were not finite
    nan_steps: int = 0  # the same without those that lower fp16's loss scale

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
        """Runs one optimizer step on the next global batch; a step in --iterations-to-skip only reads its batch."""
        started, state, run = time.perf_counter(), self.state, self.run
        with self.data_parallel.timeline.span("iteration", f"iteration {state.iteration + 1}"):
            samples = self.batches.global_batch_size(state.consumed_samples)
            assert self.readers.train is not None and run.data.seq_length
            with self.timers("batch-generator", level=2), self.groups.heartbeat.phase("batch-generator"):
                microbatches = self.readers.train.read(self.batches.num_microbatches(state.consumed_samples))
            if state.iteration + 1 in (run.train.iterations_to_skip or ()):
                loss, norm, num_zeros, experts, skipped, nan = math.nan, 0.0, None, None, True, False
            else:
                position, scale = state.schedule_position, self.optimizer.loss_scale.value
                loss = self.step.forward_backward(microbatches)
                update = self.step.update(
                    self.schedule.learning_rate(position),
                    self.schedule.weight_decay(position),
                    self.schedule.decoupled_learning_rate(position),
                )
                norm, num_zeros = update.grad_norm, update.num_zeros
                experts = self.step.end_step(applied=update.applied)
                skipped, nan = self._why_not_applied(update, scale)
            state.iteration += 1
            state.consumed_samples += samples
            if not (skipped or nan):
                state.schedule_position += samples if run.train.train_samples else 1
            state.skipped_iterations += skipped
            state.nan_iterations += nan
            return StepReport(
                iteration=state.iteration,
                loss=loss,
                grad_norm=norm,
                loss_scale=self.optimizer.loss_scale.value,
                learning_rate=self.schedule.learning_rate(state.schedule_position),
                global_batch_size=samples,
                tokens=samples * run.data.seq_length,
                seconds=time.perf_counter() - started,
                skipped=skipped,
                nan=nan,
                num_zeros=num_zeros,
                experts=experts,
                params_norm=self.optimizer.params_norm() if run.logging.log_params_norm else None,
                timers=self.timers.take(),
            )

    def evaluate(self, reader: BatchReader) -> float:
        """Returns the mean loss per token over --eval-iters global batches of `reader`."""
        microbatches = self.batches.final_num_microbatches
        iterations = self.run.eval.eval_iters
        with self.groups.heartbeat.phase("evaluate"):
            return evaluate(
                self.model, lambda: reader.read(microbatches), iterations, self.groups, self.settings.pipeline
            )

    def any_rank(self, condition: bool) -> bool:
        """Returns whether `condition` holds on any rank. Communication: one max all-reduce of a number over the world."""
        flag = torch.tensor([float(condition)], device=self.device)
        return bool(all_reduce(flag, self.groups.world, "max"))

    def _why_not_applied(self, update: Update, scale: float) -> tuple[bool, bool]:
        """(skipped because the loss scale, `scale` in this step, was too large; left out because of a NaN).

        Both are False for an update that was applied. Counts the steps whose gradients were not finite.
        """
        # A scale at its floor has nothing left to lower: then it is no overflow but a NaN.
        overflow = self.optimizer.loss_scale.dynamic and scale > self.run.optimizer.min_loss_scale
        is_bad = not math.isfinite(update.grad_norm)
        self.bad_steps = self.bad_steps + 1 if is_bad else 0
        self.nan_steps = self.nan_steps + 1 if is_bad and not overflow else 0
        return overflow and not update.applied, not (overflow or update.applied)
