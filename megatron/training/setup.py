"""Builds a run. `build` is the order of it; each stage is a function here, or in the file that its import names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.config.batch_schedule import BatchSchedule
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.device import synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups, with_shared_heads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.families import write_config
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import local_parameters
from megatron.core.transformer.context import Build
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.schedule.partition import Stage
from megatron.spec.decoder import decoder_spec
from megatron.training.announce import announce
from megatron.training.checkpoint import load_checkpoint, saved_model_config
from megatron.training.initial_weights import initial_weights
from megatron.training.logging.timed_phase import timed_phase
from megatron.training.logging.timers import Timers
from megatron.training.offload import build_step_offload, build_weight_offload
from megatron.training.prepare import Prepared, balance_recompute, prepare
from megatron.training.readers import build_readers
from megatron.training.start import find_start, settle_files
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.together import together
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import with_vocabulary


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Everything a run needs, continued from --load when that holds a checkpoint. Collective over the world."""
    run, checkpoint, tokenizer = read_files(run, groups)
    settings = resolve(run, groups.mesh)
    holders = decoder_spec(run.model).layers[0].attention.group_holders(groups.tp.size)
    timeout = run.parallel.distributed_timeout_minutes * 60
    groups = with_shared_heads(groups, holders, timeout)
    prepared = balance_recompute(run, settings, groups, prepare(run, settings, groups, device))
    model = build_gpt(prepared.shared, settings.pipeline.stages_of(groups.pp.rank))
    parameters, rng = local_parameters(model), prepared.shared.rng
    has_checkpoint = checkpoint is not None
    initial_weights(parameters, groups, run.model, run.checkpoint, run.train.seed, has_checkpoint=has_checkpoint)
    data_parallel, optimizer = build_optimizer(run, settings, groups, model, prepared)
    schedule = build_schedule(run.schedule, run.optimizer, run.train.train_samples, settings.batches)
    timers = Timers(run.logging.timing_log_level, lambda: synchronize(device))
    step = build_step(run, settings, groups, model, data_parallel, optimizer, timers, prepared)
    state = TrainState()
    if checkpoint is not None:
        with timed_phase("load-checkpoint", groups):
            state = load_checkpoint(
                checkpoint, run, groups, device, parameters, data_parallel, optimizer, rng=rng, schedule=schedule
            )
    settings.batches.check_from(state.consumed_samples)
    check_schedules(settings, state.consumed_samples, evaluates=run.eval.eval_iters > 0)
    with groups.heartbeat.phase("build-datasets"):
        readers = build_readers(run, settings.batches, groups, device, state, tokenizer.eod)
    trainer = Trainer(
        run=run,
        settings=settings,
        groups=groups,
        device=device,
        model=model,
        parameters=parameters,
        data_parallel=data_parallel,
        optimizer=optimizer,
        rng=rng,
        schedule=schedule,
        readers=readers,
        timers=timers,
        state=state,
        step=step,
    )
    announce(trainer, prepared)
    return trainer


def read_files(run: RunConfig, groups: Groups) -> tuple[RunConfig, Path | None, Tokenizer]:
    """(the run as its files complete it, the checkpoint to load, the tokenizer). Collective over the world.

    The files are a checkpoint, whose model's shape --use-checkpoint-args takes, and the tokenizer's. Raises UserError.
    """
    asked = run.checkpoint
    run, checkpoint = together(groups.world, lambda: find_start(run))
    if checkpoint and run.checkpoint.use_checkpoint_args:
        saved = together(groups.world, lambda: saved_model_config(checkpoint))
        run = dataclasses.replace(run, model=_shape_from(run.model, saved))
        check(dataclasses.replace(run, checkpoint=asked), groups.world.size)
    if run.train.skip_train:
        run = _evaluation_only(run)
    run = together(groups.world, lambda: settle_files(run))
    tokenizer = together(groups.world, lambda: build_tokenizer(run.tokenizer, run.model.vocab_size))
    run = with_vocabulary(run, tokenizer.vocab_size, checkpoint)
    if run.checkpoint.save_hf:
        write_config(run.model)  # raises now, and not at the first save, if no Hugging Face family can hold the model
    return run, checkpoint, tokenizer


def build_gpt(shared: Build, stages: Sequence[Stage] | None = None) -> GPTModel:
    """This rank's stages of the decoder, uninitialised; default all of it. With LoRA all but the adapters is frozen."""
    model = GPTModel(shared, stages)
    if shared.config.lora_rank:
        freeze_all_but_adapters(local_parameters(model))
    return model


def build_optimizer(
    run: RunConfig, settings: RunSettings, groups: Groups, model: GPTModel, prepared: Prepared
) -> tuple[DataParallel, Optimizer]:
    """The memory of parameters and gradients, and what updates them. Collective over the world. Raises ConfigError."""
    offload, directory = settings.optimizer_offload, run.optimizer_offload.offload_dir
    data_parallel = DataParallel(
        model,
        groups,
        settings.data_parallel,
        prepared.shared.device,
        {name: stage for name in local_parameters(model) if (stage := model.stage_of(name)) is not None},
        prepared.streams,
        late_updates=offload.overlap,
        weight_offload=together(
            groups.world, lambda: build_weight_offload(run.activation_offload, directory, model, prepared.streams)
        ),
    )
    optimizer = together(
        groups.world,
        lambda: Optimizer(run.optimizer, data_parallel, groups, fp16=run.model.fp16, offload=offload),
    )
    return data_parallel, optimizer


def build_schedule(
    schedule: ScheduleConfig, optimizer: OptimizerConfig, train_samples: int | None, batches: BatchSchedule
) -> ParamSchedule:
    """Learning rate and weight decay, in samples with --train-samples and in iterations otherwise."""
    if train_samples:
        return ParamSchedule(schedule, optimizer, train_samples, "samples")
    return ParamSchedule(schedule, optimizer, batches.total_iterations, "iterations")


def build_step(
    run: RunConfig,
    settings: RunSettings,
    groups: Groups,
    model: GPTModel,
    data_parallel: DataParallel,
    optimizer: Optimizer,
    timers: Timers,
    prepared: Prepared,
) -> TrainStep:
    """The training step, with activation offload if the flags or balanced recompute ask for it. Collective over the
    world. Raises ConfigError.
    """
    directory = run.optimizer_offload.offload_dir
    offloaded = () if prepared.balanced is None else prepared.balanced.layers.offloaded
    offload = together(
        groups.world,
        lambda: build_step_offload(
            run.activation_offload, directory, model, groups, prepared.streams, data_parallel.parameter_of, offloaded
        ),
    )
    return TrainStep(
        model,
        data_parallel,
        optimizer,
        groups,
        timers,
        per_token=run.train.calculate_per_token_loss,
        count_zeros=run.logging.log_num_zeros_in_grad,
        pipeline=settings.pipeline,
        offload=offload,
    )


def check_schedules(settings: RunSettings, consumed_samples: int, *, evaluates: bool) -> None:
    """Build, and so check, the schedules of the next step, of the final batch size and of evaluations.

    Those of batch sizes between are checked when a ramp comes to them. Raises ScheduleError, on all ranks alike.
    """
    pipeline, batches = settings.pipeline, settings.batches
    for microbatches in {batches.num_microbatches(consumed_samples), batches.final_num_microbatches}:
        pipeline.schedule_of(microbatches)
    if evaluates:
        pipeline.evaluation_of(batches.final_num_microbatches)


def _shape_from(asked: ModelConfig, saved: ModelConfig) -> ModelConfig:
    """The saved model in this run's precision and with its kernels: those are not part of the model's shape."""
    return dataclasses.replace(saved, **{name: getattr(asked, name) for name in RUNTIME_FIELDS})


def _evaluation_only(run: RunConfig) -> RunConfig:
    """With --skip-train the length and the learning rate need not be given; the schedule is built and never asked."""
    train = dataclasses.replace(run.train, train_iters=None if run.train.train_samples else run.train.train_iters or 1)
    return dataclasses.replace(run, train=train, schedule=ScheduleConfig(lr=1.0, lr_decay_style="constant"))
