"""Builds a run. `build` is the order of it; each stage is a function here, or in the file that its import names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.base.errors import ConfigError
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.optimizer import ScheduleConfig
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import barrier
from megatron.core.comm.connections import connect_all
from megatron.core.datasets.sample import Splits
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.expert_parallel.plan import ReadCounts, read_counts
from megatron.core.groups import Groups, with_experts, with_shared_heads
from megatron.core.models.hf.families import base_family, write_config
from megatron.core.models.source import Source
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.kernels.ops.gemm import slow_half
from megatron.spec.decoder import decoder_spec
from megatron.spec.sizes import Target
from megatron.training.announce import announce
from megatron.training.background_save import BackgroundSave
from megatron.training.batch import BatchSource
from megatron.training.build_model import build_trained_model
from megatron.training.carried_by_run import carried_by
from megatron.training.checkpoint import load_checkpoint
from megatron.training.data_order import dataset_sizes
from megatron.training.initial_weights import weights_to_convert
from megatron.training.local_checkpoints import LocalCheckpoints, newest_start
from megatron.training.logging.timed_phase import timed_phase
from megatron.training.prepare import Prepared, balance_recompute, prepare
from megatron.training.readers import build_readers
from megatron.training.result_check import build_result_check
from megatron.training.saved_model import saved_model_config
from megatron.training.start import find_start, settle_files
from megatron.training.state import TrainState
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel
from megatron.training.trainer import Trainer
from megatron.training.vocabulary import with_vocabulary


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Builds everything that a run needs, continued from --load if that holds a checkpoint.
    Collective over the world. Raises ConfigError for a run that samples its data."""
    if run.data.perform_rl_step:
        raise ConfigError("--perform-rl-step is a flag of train_rl.py; start that program with these flags")
    run, checkpoint, tokenizer = read_files(run, groups)

    def open_data(settings: RunSettings, state: TrainState) -> Splits[BatchSource | None]:
        with groups.heartbeat.phase("build-datasets"):
            sizes = dataset_sizes(run.data, run.train, run.eval, settings.batches, state)
            assert run.model.vocab_size
            return build_readers(
                run.data, run.train, sizes, groups, device, state, vocab_size=run.model.vocab_size, eod=tokenizer.eod
            )

    return assemble(run, checkpoint, groups, Streams(device, Timeline(device)), open_data)


def assemble(
    run: RunConfig,
    checkpoint: Path | None,
    groups: Groups,
    streams: Streams,
    open_data: Callable[[RunSettings, TrainState], Splits[BatchSource | None]],
    read_counts: ReadCounts = read_counts,
) -> Trainer:
    """Builds a run whose files have been read, continued from `checkpoint`. Collective over the world.

    streams: of the device of the run. open_data: returns the readers of a run in this state. read_counts: brings the
    counts of an exchange of tokens to the host.
    """
    settings = resolve(run, groups.mesh)
    groups = connect_model(run, settings, groups, streams.device)
    prepared = prepare_layers(run, settings, groups, streams, read_counts)
    converted = None if checkpoint is None else _weights_to_convert(checkpoint, run, groups)
    trained = build_trained_model(run, settings, prepared, checkpoint, converted)
    state = TrainState()
    if checkpoint is not None:
        with timed_phase("load-checkpoint", groups):
            state = load_checkpoint(checkpoint, trained, has_weights=converted is not None)
    trained.results.plan(run.train.iterations_to_skip, state.iteration)
    settings.batches.check_from(state.consumed_samples)
    check_schedules(settings, state.consumed_samples, evaluates=run.eval.eval_iters > 0)
    trainer = Trainer(
        **vars(trained),
        readers=open_data(settings, state),
        state=state,
        target=target_of(trained, prepared),
        carried=together(groups.world, lambda: carried_by(run, checkpoint)),
        reads_late=streams.device.type == "cuda",
    )
    trainer.result_check = build_result_check(trainer, prepared.shared.kernels.fused.square_sum)
    keeps = run.checkpoint.non_persistent_save_interval is not None and not run.train.skip_train
    if keeps:
        timeout_seconds = run.parallel.distributed_timeout_minutes * 60
        trainer.local_checkpoints = LocalCheckpoints(run.checkpoint, checkpoint, groups, timeout_seconds)
    if run.checkpoint.async_save or keeps:
        trainer.background_save = BackgroundSave(streams)
        trained.data_parallel.before_write = trainer.background_save.staging.before_write
    announce(trainer, prepared)
    return trainer


def read_files(run: RunConfig, groups: Groups) -> tuple[RunConfig, Path | None, Tokenizer]:
    """Returns (the run as its files complete it, the checkpoint to load, the tokenizer). Collective over the world.

    The files are a checkpoint, whose model's shape --use-checkpoint-args takes, and the tokenizer's. Raises UserError.
    """
    sft, trains = run.data.sft, not run.train.skip_train
    config, checkpoint = together(groups.world, lambda: find_start(run.checkpoint, sft=sft, trains=trains))
    if run.checkpoint.non_persistent_save_interval is not None and trains:
        config, checkpoint = newest_start(run.checkpoint, config, checkpoint, groups)
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
            complete = dataclasses.replace(run, model=model, checkpoint=config)
            carried = together(groups.world, lambda: carried_by(complete, checkpoint))
            write_config(model, base, carried)
    return (
        dataclasses.replace(run, model=model, checkpoint=config, tokenizer=tokenizer_config),
        checkpoint,
        tokenizer,
    )


def connect_model(run: RunConfig, settings: RunSettings, groups: Groups, device: torch.device) -> Groups:
    """Returns the groups with those that depend on the model, connected. Collective over the world."""
    timeout_seconds = run.parallel.distributed_timeout_minutes * 60
    holders = decoder_spec(run.model).first_core.group_holders(groups.tp.size)
    groups = with_shared_heads(groups, holders, timeout_seconds, settings.communicators)
    barrier(groups.tp_inner)  # connects it: [Note: when NCCL makes a communicator] in comm/connections.py
    if run.model.num_experts:
        groups = with_experts(groups, timeout_seconds, settings.communicators)
        connect_all(groups.etp_ep, device)
        barrier(groups.tp_cp)
    return groups


def prepare_layers(
    run: RunConfig, settings: RunSettings, groups: Groups, streams: Streams, read_counts: ReadCounts
) -> Prepared:
    """Returns the arguments that all layers share. Communication: see `prepare` and `balance_recompute`.

    Raises ConfigError.
    """
    prepared = prepare(
        run.model,
        run.moe,
        run.fp8,
        run.parallel,
        run.recompute,
        settings,
        groups,
        streams,
        documents=run.data.separate_documents,
        seed=run.train.seed,
        optimizer=None if run.train.skip_train else run.optimizer,
        z_loss=run.train.z_loss_coeff or 0.0,
        loss_chunk=run.train.cross_entropy_chunk_size,
        temperature=run.rl.rollout_temperature,
        read_counts=read_counts,
    )
    offload_dir = run.optimizer_offload.offload_dir
    return balance_recompute(run.recompute, run.data, run.train, offload_dir, settings, prepared)


def target_of(trained: TrainedModel, prepared: Prepared) -> Target:
    """Returns the properties of device and kernels that the memory plan depends on."""
    device = trained.device
    return Target(
        cpu=device.type == "cpu",
        wide=any(slow_half(device, bucket.dtype) for bucket in trained.data_parallel.buckets),
        fused=prepared.shared.kernels.fused.without_copies,
    )


def check_schedules(settings: RunSettings, consumed_samples: int, *, evaluates: bool) -> None:
    """Builds, and so checks, the schedules of the next step, of the final batch size and of evaluations.

    Schedules of the batch sizes between them are checked when a ramp comes to them. Raises ScheduleError, on all ranks.
    """
    pipeline, batches = settings.pipeline, settings.batches
    for microbatches in {batches.num_microbatches(consumed_samples), batches.final_num_microbatches}:
        pipeline.schedule_of(microbatches)
    if evaluates:
        pipeline.evaluation_of(batches.final_num_microbatches)


def _shape_from(run: RunConfig, saved: ModelConfig) -> ModelConfig:
    """Returns the saved model in this run's precision and with its kernels, which are not part of its shape.

    The flags that the run may set beside the shape are those of the run.
    """
    names = {*RUNTIME_FIELDS, *run.checkpoint.override_model_fields, *({"vocab_size"} & run.given)}
    model = dataclasses.replace(saved, **{name: getattr(run.model, name) for name in names})
    # Adapters train no layer that predicts further tokens.
    return dataclasses.replace(model, mtp_num_layers=0) if model.lora_rank else model


# With --skip-train the learning rate need not be given: the schedule is built but not used.
_NO_SCHEDULE = ScheduleConfig(lr=1.0, lr_decay_style="constant")


def _evaluation_only(train: TrainConfig) -> TrainConfig:
    """Returns the flags of a run with --skip-train, whose length need not be given."""
    return dataclasses.replace(train, train_iters=None if train.train_samples else train.train_iters or 1)


def _weights_to_convert(checkpoint: Path, run: RunConfig, groups: Groups) -> Source | None:
    return together(groups.world, lambda: weights_to_convert(checkpoint, run.checkpoint, run.model))
