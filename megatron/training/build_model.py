"""Builds a model and all that trains it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data import DataConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.core.device import synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.source import Source
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import local_parameters
from megatron.core.streams.graph import CudaGraphs
from megatron.core.transformer.context import Build
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.choose_fp8 import choose_fp8
from megatron.kernels.choose_fp8_experts import choose_fp8_experts
from megatron.schedule.partition import Stage
from megatron.spec.flops import train_flops
from megatron.spec.fp8 import fp8_linears
from megatron.training.balanced_documents import BalancedDocuments
from megatron.training.expert_load import ExpertLoad
from megatron.training.fp8 import Fp8Layers
from megatron.training.graphs import build_graphs, uses_graphs
from megatron.training.initial_weights import initial_weights
from megatron.training.logging.timers import Timers
from megatron.training.offload import StepOffload, build_step_offload, build_weight_offload
from megatron.training.prepare import Prepared
from megatron.training.step import TrainStep
from megatron.training.step_features import StepFeatures
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel


def build_trained_model(
    run: RunConfig, settings: RunSettings, prepared: Prepared, checkpoint: Path | None, converted: Source | None
) -> TrainedModel:
    """Returns a model with initial weights, and all that trains it. Collective over the world.

    checkpoint, converted: see `initial_weights`. Raises ConfigError and CheckpointError.
    """
    shared = prepared.shared
    groups, device = shared.groups, shared.device
    model = build_gpt(shared, settings.pipeline.stages_of(groups.pp.rank))
    parameters = local_parameters(model)
    buffers = dict(model.named_buffers())
    initial_weights(parameters, groups, run.model, run.checkpoint, run.train.seed, checkpoint, converted, buffers)
    data_parallel = build_data_parallel(run, settings, model, prepared)
    optimizer = build_optimizer(run, settings, data_parallel, shared)
    timers = Timers(run.logging.timing_log_level, lambda: synchronize(device))
    step = TrainStep(
        model,
        data_parallel,
        optimizer,
        groups,
        timers,
        per_token=run.train.calculate_per_token_loss,
        further_weight=run.train.mtp_loss_scaling_factor,
        count_zeros=run.logging.log_num_zeros_in_grad,
        pipeline=settings.pipeline,
        features=build_features(run, model, data_parallel, prepared),
        documents=build_documents(run.data, settings, shared),
    )
    return TrainedModel(
        run=run,
        settings=settings,
        groups=groups,
        device=device,
        model=model,
        parameters=parameters,
        data_parallel=data_parallel,
        optimizer=optimizer,
        rng=shared.rng,
        schedule=build_schedule(run.schedule, run.optimizer, run.train.train_samples, settings.batches),
        timers=timers,
        step=step,
    )


def build_gpt(shared: Build, stages: Sequence[Stage] | None = None) -> GPTModel:
    """Returns this rank's stages of the decoder, uninitialised; default all of it.

    With LoRA all parameters but those of adapters are frozen.
    """
    model = GPTModel(shared, stages)
    if shared.config.lora_rank:
        freeze_all_but_adapters(local_parameters(model))
    return model


def build_data_parallel(run: RunConfig, settings: RunSettings, model: GPTModel, prepared: Prepared) -> DataParallel:
    """Returns the memory of parameters and gradients. Collective over the world. Raises ConfigError."""
    groups, streams, offload_dir = prepared.shared.groups, prepared.streams, run.optimizer_offload.offload_dir
    return DataParallel(
        model,
        groups,
        settings.data_parallel,
        prepared.shared.device,
        {name: stage for name in local_parameters(model) if (stage := model.stage_of(name)) is not None},
        streams,
        late_updates=settings.optimizer_offload.overlap,
        weight_offload=together(
            groups.world, lambda: build_weight_offload(run.activation_offload, offload_dir, model, streams)
        ),
    )


def build_optimizer(run: RunConfig, settings: RunSettings, data_parallel: DataParallel, shared: Build) -> Optimizer:
    """Returns the optimizer of this rank's slices. Collective over the world. Raises ConfigError."""
    groups, fused = shared.groups, shared.kernels.fused
    return together(
        groups.world,
        lambda: Optimizer(
            run.optimizer,
            data_parallel,
            groups,
            fp16=run.model.fp16,
            offload=settings.optimizer_offload,
            make_adamw=fused.make_adamw,
            squares=fused.square_sum,
        ),
    )


def build_schedule(
    schedule: ScheduleConfig, optimizer: OptimizerConfig, train_samples: int | None, batches: BatchSchedule
) -> ParamSchedule:
    """Returns learning rate and weight decay, in samples with --train-samples and in iterations otherwise."""
    if train_samples:
        return ParamSchedule(schedule, optimizer, train_samples, "samples")
    return ParamSchedule(schedule, optimizer, batches.total_iterations, "iterations")


def build_documents(data: DataConfig, settings: RunSettings, shared: Build) -> BalancedDocuments | None:
    """Returns what assigns documents to ranks, where the sizes of context-parallel groups differ."""
    if settings.dynamic_context is None:
        return None
    assert data.seq_length
    work = functools.cache(functools.partial(train_flops, shared.spec, samples=1))
    return BalancedDocuments(shared.groups, settings.dynamic_context, work, data.seq_length)


def build_features(run: RunConfig, model: GPTModel, data_parallel: DataParallel, prepared: Prepared) -> StepFeatures:
    """Returns the optional features of the run's steps. Collective over the world. Raises ConfigError."""
    groups, device = prepared.shared.groups, prepared.shared.device
    offload = build_offload(run, model, data_parallel, prepared)
    fp8 = build_fp8(run, model, data_parallel, prepared.shared) if run.fp8.enabled else None
    graphs = None
    if uses_graphs(run.train, device):
        graphs = build_graphs(run.train, model, data_parallel, groups.pp.rank, CudaGraphs(device).pool)
    experts = ExpertLoad(model, groups, run.moe, device) if run.model.num_experts else None
    return StepFeatures(fp8, graphs, offload, experts)


def build_offload(
    run: RunConfig, model: GPTModel, data_parallel: DataParallel, prepared: Prepared
) -> StepOffload | None:
    """Returns the activation offload that the flags or balanced recompute ask for. Collective over the world.

    Raises ConfigError.
    """
    config, offload_dir, groups = run.activation_offload, run.optimizer_offload.offload_dir, prepared.shared.groups
    streams, parameter_of, layers = prepared.streams, data_parallel.parameter_of, prepared.offloaded_layers
    return together(
        groups.world,
        lambda: build_step_offload(config, offload_dir, model, groups, streams, parameter_of, layers),
    )


def build_fp8(run: RunConfig, model: GPTModel, data_parallel: DataParallel, shared: Build) -> Fp8Layers:
    """Gives the FP8 layers of a model their kernels, and returns them. Raises ConfigError, on all ranks."""
    config, groups, kernels = run.fp8, shared.groups, shared.kernels
    features = {
        name: linear.local_features(groups.tp.size) for name, linear in fp8_linears(shared.spec, config).items()
    }
    chosen = together(groups.world, lambda: choose_fp8(config, shared.device, features, kernels.engine))
    experts = choose_fp8_experts(config, shared.config, groups.etp.size, shared.device)
    freed = data_parallel.sharded_names
    return Fp8Layers(config, shared.spec, model, groups, kernels, chosen, experts, freed, shared.device)
