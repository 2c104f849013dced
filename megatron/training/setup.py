"""Builds a run. `build` is the order of it; each stage is a function here, or in the file that its import names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.fp8 import Fp8Config
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import barrier
from megatron.core.comm.connections import connect_all
from megatron.core.datasets.sample import Splits
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.device import synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups, with_experts, with_shared_heads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.families import base_family, write_config
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import local_parameters
from megatron.core.streams.graph import CudaGraphs
from megatron.core.transformer.context import Build
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.choose_fp8 import choose_fp8
from megatron.kernels.choose_fp8_experts import choose_fp8_experts
from megatron.kernels.ops.gemm import slow_half
from megatron.schedule.partition import Stage
from megatron.spec.decoder import decoder_spec
from megatron.spec.fp8 import fp8_linears
from megatron.spec.sizes import Target
from megatron.training.announce import announce
from megatron.training.batch import BatchReader
from megatron.training.checkpoint import load_checkpoint, saved_model_config
from megatron.training.data_order import dataset_sizes
from megatron.training.expert_load import ExpertLoad
from megatron.training.fp8 import Fp8Layers
from megatron.training.graphs import build_graphs, uses_graphs
from megatron.training.initial_weights import initial_weights, weights_to_convert
from megatron.training.logging.timed_phase import timed_phase
from megatron.training.logging.timers import Timers
from megatron.training.offload import StepOffload, build_step_offload, build_weight_offload
from megatron.training.prepare import Prepared, balance_recompute, prepare
from megatron.training.readers import build_readers
from megatron.training.start import find_start, settle_files
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.step_features import StepFeatures
from megatron.training.together import together
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import with_vocabulary


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Builds everything that a run needs, continued from --load if that holds a checkpoint. Collective over the world."""
    run, checkpoint, tokenizer = read_files(run, groups)

    def open_data(settings: RunSettings, state: TrainState) -> Splits[BatchReader | None]:
        with groups.heartbeat.phase("build-datasets"):
            sizes = dataset_sizes(run.data, run.train, run.eval, settings.batches, state)
            assert run.model.vocab_size
            return build_readers(
                run.data, run.train, sizes, groups, device, state, vocab_size=run.model.vocab_size, eod=tokenizer.eod
            )

    return assemble(run, checkpoint, groups, device, open_data)


def assemble(
    run: RunConfig,
    checkpoint: Path | None,
    groups: Groups,
    device: torch.device,
    open_data: Callable[[RunSettings, TrainState], Splits[BatchReader | None]],
) -> Trainer:
    """Builds a run whose files have been read, continued from `checkpoint`. Collective over the world.

    open_data: returns the readers of a run in this state.
    """
    settings, offload_dir = resolve(run, groups.mesh), run.optimizer_offload.offload_dir
    holders = decoder_spec(run.model).layers[0].attention.group_holders(groups.tp.size)
    timeout_seconds = run.parallel.distributed_timeout_minutes * 60
    groups = with_shared_heads(groups, holders, timeout_seconds, settings.communicators)
    barrier(groups.tp_inner)  # connects it: [Note: when NCCL makes a communicator] in comm/connections.py
    if run.model.num_experts:
        groups = with_experts(groups, timeout_seconds, settings.communicators)
        connect_all(groups.etp_ep, device)
        barrier(groups.tp_cp)
    prepared = prepare(
        run.model,
        run.moe,
        run.fp8,
        run.parallel,
        run.recompute,
        settings,
        groups,
        device,
        documents=run.data.separate_documents,
        seed=run.train.seed,
        optimizer=None if run.train.skip_train else run.optimizer,
        z_loss=run.train.z_loss_coeff or 0.0,
    )
    prepared = balance_recompute(run.recompute, run.data, run.train, offload_dir, settings, prepared)
    model = build_gpt(prepared.shared, settings.pipeline.stages_of(groups.pp.rank))
    parameters, rng = local_parameters(model), prepared.shared.rng
    converted = together(
        groups.world, lambda: weights_to_convert(checkpoint, run.checkpoint, run.model) if checkpoint else None
    )
    initial_weights(parameters, groups, run.model, run.checkpoint, run.train.seed, checkpoint, converted)
    data_parallel = build_data_parallel(run.activation_offload, offload_dir, settings, groups, model, prepared)
    optimizer = together(
        groups.world,
        lambda: Optimizer(
            run.optimizer,
            data_parallel,
            groups,
            fp16=run.model.fp16,
            offload=settings.optimizer_offload,
            make_adamw=prepared.shared.kernels.fused.make_adamw,
            squares=prepared.shared.kernels.fused.square_sum,
        ),
    )
    schedule = build_schedule(run.schedule, run.optimizer, run.train.train_samples, settings.batches)
    timers = Timers(run.logging.timing_log_level, lambda: synchronize(device))
    step = TrainStep(
        model,
        data_parallel,
        optimizer,
        groups,
        timers,
        per_token=run.train.calculate_per_token_loss,
        count_zeros=run.logging.log_num_zeros_in_grad,
        pipeline=settings.pipeline,
        features=build_features(run, groups, model, data_parallel, prepared),
    )
    state = TrainState()
    if checkpoint is not None:
        with timed_phase("load-checkpoint", groups):
            state = load_checkpoint(
                checkpoint,
                run,
                groups,
                device,
                parameters,
                dict(model.named_buffers()),
                data_parallel,
                optimizer,
                rng=rng,
                schedule=schedule,
                fp8=step.features.fp8,
                has_weights=converted is not None,
            )
    settings.batches.check_from(state.consumed_samples)
    check_schedules(settings, state.consumed_samples, evaluates=run.eval.eval_iters > 0)
    readers = open_data(settings, state)
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
        target=Target(
            cpu=device.type == "cpu",
            wide=any(slow_half(device, bucket.dtype) for bucket in data_parallel.buckets),
            fused=prepared.shared.kernels.fused.without_copies,
        ),
        reads_late=device.type == "cuda",
    )
    announce(trainer, prepared)
    return trainer


def read_files(run: RunConfig, groups: Groups) -> tuple[RunConfig, Path | None, Tokenizer]:
    """Returns (the run as its files complete it, the checkpoint to load, the tokenizer). Collective over the world.

    The files are a checkpoint, whose model's shape --use-checkpoint-args takes, and the tokenizer's. Raises UserError.
    """
    asked, sft, trains = run.checkpoint, run.data.sft, not run.train.skip_train
    config, checkpoint = together(groups.world, lambda: find_start(asked, sft=sft, trains=trains))
    model = run.model
    if checkpoint and config.use_checkpoint_args:
        model = _shape_from(run, together(groups.world, lambda: saved_model_config(checkpoint)))
        check(dataclasses.replace(run, model=model), groups.world.size)
    if not trains:
        run = dataclasses.replace(run, train=_evaluation_only(run.train), schedule=_NO_SCHEDULE)
    tokenizer_config, config = together(groups.world, lambda: settle_files(run.tokenizer, config, run.data))
    tokenizer = together(groups.world, lambda: build_tokenizer(tokenizer_config, model.vocab_size))
    model = with_vocabulary(
        model,
        run.given,
        checkpoint,
        tokenizer_vocab_size=tokenizer.vocab_size,
        seq_length=run.data.seq_length,
        tp=run.parallel.tensor_model_parallel_size,
        continues=checkpoint is not None and not config.finetune,
    )
    if config.save_hf:
        # Raise now, and not at the first save, if no Hugging Face family can hold the model.
        base = None if config.load_hf is None else Path(config.load_hf)
        if model.lora_rank:
            base_family(model, base)
        else:
            write_config(model, base)
    return (
        dataclasses.replace(run, model=model, checkpoint=config, tokenizer=tokenizer_config),
        checkpoint,
        tokenizer,
    )


def build_gpt(shared: Build, stages: Sequence[Stage] | None = None) -> GPTModel:
    """This rank's stages of the decoder, uninitialised; default all of it. With LoRA all but the adapters is frozen."""
    model = GPTModel(shared, stages)
    if shared.config.lora_rank:
        freeze_all_but_adapters(local_parameters(model))
    return model


def build_data_parallel(
    activation_offload: ActivationOffloadConfig,
    offload_dir: str | None,
    settings: RunSettings,
    groups: Groups,
    model: GPTModel,
    prepared: Prepared,
) -> DataParallel:
    """Returns the memory of parameters and gradients. Collective over the world. Raises ConfigError."""
    return DataParallel(
        model,
        groups,
        settings.data_parallel,
        prepared.shared.device,
        {name: stage for name in local_parameters(model) if (stage := model.stage_of(name)) is not None},
        prepared.streams,
        late_updates=settings.optimizer_offload.overlap,
        weight_offload=together(
            groups.world, lambda: build_weight_offload(activation_offload, offload_dir, model, prepared.streams)
        ),
    )


def build_schedule(
    schedule: ScheduleConfig, optimizer: OptimizerConfig, train_samples: int | None, batches: BatchSchedule
) -> ParamSchedule:
    """Learning rate and weight decay, in samples with --train-samples and in iterations otherwise."""
    if train_samples:
        return ParamSchedule(schedule, optimizer, train_samples, "samples")
    return ParamSchedule(schedule, optimizer, batches.total_iterations, "iterations")


def build_features(
    run: RunConfig, groups: Groups, model: GPTModel, data_parallel: DataParallel, prepared: Prepared
) -> StepFeatures:
    """Returns the optional features of the run's steps. Collective over the world. Raises ConfigError."""
    device, offload_dir = prepared.shared.device, run.optimizer_offload.offload_dir
    offload = build_offload(run.activation_offload, offload_dir, groups, model, data_parallel, prepared)
    fp8 = build_fp8(run.fp8, groups, model, data_parallel, prepared)
    graphs = None
    if uses_graphs(run.train, device):
        graphs = build_graphs(run.train, model, data_parallel, groups.pp.rank, CudaGraphs(device).pool)
    experts = ExpertLoad(model, groups, run.moe, device) if run.model.num_experts else None
    return StepFeatures(fp8, graphs, offload, experts)


def build_offload(
    activation_offload: ActivationOffloadConfig,
    offload_dir: str | None,
    groups: Groups,
    model: GPTModel,
    data_parallel: DataParallel,
    prepared: Prepared,
) -> StepOffload | None:
    """Returns the activation offload that the flags or balanced recompute ask for. Collective over the world.

    Raises ConfigError.
    """
    streams, parameter_of, chosen = prepared.streams, data_parallel.parameter_of, prepared.offloaded_layers
    return together(
        groups.world,
        lambda: build_step_offload(activation_offload, offload_dir, model, groups, streams, parameter_of, chosen),
    )


def build_fp8(
    fp8: Fp8Config, groups: Groups, model: GPTModel, data_parallel: DataParallel, prepared: Prepared
) -> Fp8Layers | None:
    """Gives the FP8 layers their kernels, and returns them; None if there are none. Raises ConfigError, on all ranks."""
    if not fp8.enabled:
        return None
    shared, tp = prepared.shared, groups.tp.size
    features = {name: linear.local_features(tp) for name, linear in fp8_linears(shared.spec, fp8).items()}
    chosen = together(groups.world, lambda: choose_fp8(fp8, shared.device, features, shared.kernels.engine))
    experts = choose_fp8_experts(fp8, shared.config, groups.etp.size, shared.device)
    return Fp8Layers(
        fp8, shared.spec, model, groups, shared.kernels, chosen, experts, data_parallel.sharded_names, shared.device
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


def _shape_from(run: RunConfig, saved: ModelConfig) -> ModelConfig:
    """The saved model in this run's precision and with its kernels, which are not part of its shape, and with the flags
    that the run may set beside it.
    """
    names = {*RUNTIME_FIELDS, *run.checkpoint.override_model_fields, *({"vocab_size"} & run.given)}
    return dataclasses.replace(saved, **{name: getattr(run.model, name) for name in names})


# With --skip-train the learning rate need not be given: the schedule is built but not used.
_NO_SCHEDULE = ScheduleConfig(lr=1.0, lr_decay_style="constant")


def _evaluation_only(train: TrainConfig) -> TrainConfig:
    """Returns the flags of a run with --skip-train, whose length need not be given."""
    return dataclasses.replace(train, train_iters=None if train.train_samples else train.train_iters or 1)
