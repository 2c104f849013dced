"""One mode of benchmarks/recompute.py: a model in training, built as in a run."""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch

from benchmarks.shape import llama
from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.data import DataConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.pipeline import pipeline_settings
from megatron.config.recompute import BALANCED, RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import create_groups
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import initialize, local_parameters
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.timeline import Timeline
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.planner.memory.rank_choice import RankChoice
from megatron.training.balanced_recompute import choose_by_measuring
from megatron.training.batch import Batch
from megatron.training.build_model import build_gpt
from megatron.training.logging.timers import Timers
from megatron.training.microbatches import Targets
from megatron.training.offload import build_step_offload
from megatron.training.step import ForwardProgram, TrainStep
from megatron.training.step_features import StepFeatures

LR, WEIGHT_DECAY = 1e-4, 0.01


class Trial:
    """A model in training. `balanced` is the plan of the balanced policy, or None for another policy."""

    def __init__(
        self, args: argparse.Namespace, recompute: RecomputeConfig, batch: Batch, device: torch.device
    ) -> None:
        run = _run(args, recompute)
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        streams, kernels = Streams(device, Timeline(device)), choose_kernels(run.model, device)
        shared = Build(
            run.model, groups, False, kernels, RngTracker(1, groups, device), device, recompute=run.recompute
        )
        pipeline = pipeline_settings(run.parallel, args.layers)
        stages = pipeline.stages_of(0)
        self.balanced: RankChoice | None = None
        if recompute.recompute_policy == BALANCED:
            self.balanced = choose_by_measuring(
                run.recompute, run.data, run.train, None, shared, stages, pipeline.schedule_of(1), streams
            )
            shared = dataclasses.replace(shared, recompute=self.balanced.layers)
        self._model = build_gpt(shared, stages)
        initialize(local_parameters(self._model), 1)
        data_parallel = DataParallel(self._model, groups, data_parallel_settings(run.parallel), device)
        optimizer = Optimizer(run.optimizer, data_parallel, groups, fp16=False)
        offloaded = self.balanced.layers.offloaded if self.balanced is not None else ()
        parameter_of = data_parallel.parameter_of
        self._offload = build_step_offload(
            run.activation_offload, None, self._model, groups, streams, parameter_of, offloaded
        )
        self._step = TrainStep(
            self._model,
            data_parallel,
            optimizer,
            groups,
            Timers(0, lambda: None),
            per_token=True,
            features=StepFeatures(offload=self._offload),
        )
        self._batch, self._steps = batch, 0

    def step(self) -> float:
        """Runs one step and returns the loss."""
        self._steps += 1
        loss = self._step.forward_backward([self._batch]).read()
        self._step.update(LR, WEIGHT_DECAY)
        return loss

    def saved(self) -> int:
        """Returns the bytes that a forward keeps on the device for its backward. Call it after a step."""
        forward = functools.partial(
            ForwardProgram(self._model, [self._batch], [[Targets.of(self._batch)]]).forward, 0, 0, None
        )
        moved = 0 if self._offload is None else self._offload.actions.offloaded_bytes // self._steps
        return saved_bytes(forward, self._model.parameters()) - moved


def _run(args: argparse.Namespace, recompute: RecomputeConfig) -> RunConfig:
    return RunConfig(
        model=llama(args),
        data=DataConfig(seq_length=args.seq),
        train=TrainConfig(micro_batch_size=args.batch),
        recompute=recompute,
    )
