"""Builds a run: one function an object, in the order `build` calls them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from megatron.base.errors import CheckpointError, ConfigError, UserError
from megatron.base.log import get_logger
from megatron.command_line.exits import as_user_error
from megatron.config.context import attention_comm_types, inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.features import Facts, features, format_table, worth_a_line
from megatron.config.layout import mesh_of
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.optimizer import ScheduleConfig
from megatron.config.optimizer_offload import offload_settings
from megatron.config.pipeline import pipeline_settings
from megatron.config.recompute import BALANCED
from megatron.config.rules.check import check, check_vocabulary
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.context_parallel.trace import UNTRACED, Trace
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.loader import build_loader
from megatron.core.datasets.sample import SampleDataset, Splits
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.core.device import allow_open_files, choose_device, set_cpu_threads, synchronize
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.lock import hold
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Group, Groups, backend_for, connect, create_groups, with_shared_heads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.adapter import AdapterSource
from megatron.core.models.hf.families import write_config
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import Source, fill
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import Parameter, initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.overlap import PLAIN, Plain, choose_overlap
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.timeline import Timeline
from megatron.core.transformer.context import Build
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.choose import Kernels, choose_kernels
from megatron.kernels.ops.gemm import slow_half
from megatron.planner.footprint import weight_and_optimizer_footprint
from megatron.schedule.partition import Stage
from megatron.spec.lora import is_adapter
from megatron.training.activation_offload import build_step_offload
from megatron.training.balanced_recompute import choose as choose_recompute
from megatron.training.batch import BatchReader
from megatron.training.checkpoint import load_checkpoint, saved_model_config
from megatron.training.data_order import dataset_sizes
from megatron.training.far_weights import build_far_weights
from megatron.training.logging.footprint import MIB, format_footprint
from megatron.training.logging.timed_phase import timed_phase
from megatron.training.logging.timers import Timers
from megatron.training.microbatches import BatchSchedule
from megatron.training.start import find_start, settle_files
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.trainer import Trainer

log = get_logger(__name__)
T = TypeVar("T")


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Everything a run needs, continued from --load when that holds a checkpoint. Collective over the world."""
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
        write_config(run.model)  # says now, and not at the first save, that no family can hold the model
    holders = run.model.kv_head_holders(groups.tp.size)
    groups = with_shared_heads(groups, holders, run.parallel.distributed_timeout_minutes * 60)
    kernels = choose_kernels(run.model, device)
    rng = RngTracker(run.train.seed, groups, device)
    assert run.model.num_layers
    pipeline = pipeline_settings(run.parallel, run.model.num_layers)
    timeline = Timeline(device)
    streams = Streams(device, timeline)
    overlap, overlap_why = choose_overlap(run.parallel, groups.tp, _backend(run, groups, device), streams)
    stages, cp_trace = pipeline.stages_of(groups.pp.rank), Trace(streams)
    batches = BatchSchedule(run.train, groups.mesh.dp, run.data.seq_length)
    shared = shared_arguments(run, groups, device, kernels, rng, overlap, cp_trace)
    recomputed, moved = "", frozenset[int]()
    if run.recompute.recompute_policy == BALANCED and not run.train.skip_train:
        schedule = pipeline.schedule_of(batches.final_num_microbatches)
        balanced = together(groups.world, lambda: choose_recompute(run, shared, groups, stages, schedule, timeline))
        recomputed, moved = str(balanced), balanced.layers.moved
        shared = dataclasses.replace(shared, recompute=balanced.layers)
    model = build_gpt(shared, stages)
    parameters = local_parameters(model)
    initial_weights(run, parameters, groups, has_checkpoint=checkpoint is not None)
    stage_of = {name: stage for name in parameters if (stage := model.stage_of(name)) is not None}
    offload = offload_settings(run.optimizer, run.optimizer_offload)
    data_parallel = DataParallel(
        model,
        groups,
        data_parallel_settings(run.parallel),
        device,
        stage_of,
        streams,
        late_updates=offload.overlap,
        homes=together(groups.world, lambda: build_far_weights(run, model, device, timeline)),
    )
    optimizer = together(
        groups.world,
        lambda: Optimizer(run.optimizer, data_parallel, groups, fp16=run.model.fp16, offload=offload),
    )
    timers = Timers(run.logging.timing_log_level, lambda: synchronize(device))
    trainer = Trainer(
        run=run,
        groups=groups,
        device=device,
        model=model,
        parameters=parameters,
        data_parallel=data_parallel,
        optimizer=optimizer,
        rng=rng,
        schedule=build_schedule(run, batches),
        batches=batches,
        readers=Splits(None, None, None),
        timers=timers,
        state=TrainState(),
        step=TrainStep(
            model,
            data_parallel,
            optimizer,
            groups,
            timers,
            per_token=run.train.calculate_per_token_loss,
            count_zeros=run.logging.log_num_zeros_in_grad,
            pipeline=pipeline,
            offload=together(
                groups.world,
                lambda: build_step_offload(run, model, groups, timeline, data_parallel.parameter_of, moved),
            ),
        ),
        pipeline=pipeline,
    )
    if checkpoint:
        with timed_phase("load-checkpoint", groups):
            load_checkpoint(trainer, checkpoint)
    batches.check_from(trainer.state.consumed_samples)
    trainer.check_schedules()
    with groups.heartbeat.phase("build-datasets"):
        trainer.readers = build_readers(trainer, tokenizer.eod)
    _announce(trainer, kernels, overlap.name, overlap_why, recomputed)
    return trainer


def start_process(
    run: RunConfig, rank: int, world_size: int, local_rank: int, local_world_size: int
) -> tuple[Groups, torch.device]:
    """Device, process groups and heartbeat of this process."""
    try:
        device = choose_device(run.parallel.device, local_rank)
    except UserError as error:
        error.on_all_ranks = False  # other hosts may have other devices
        raise
    set_cpu_threads(device, local_world_size)
    allow_open_files()
    if run.train.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    timeout = run.parallel.distributed_timeout_minutes * 60
    backend = backend_for(device, run.parallel.distributed_backend)
    heartbeat = connect(rank, world_size, backend=backend, timeout_seconds=timeout)
    heartbeat.start(on_stall=log.error, on_orphaned=_end_orphan)
    instances = data_parallel_settings(run.parallel).optimizer_instances
    mesh, inner = mesh_of(run.parallel, world_size), inner_size(run.parallel)
    return create_groups(mesh, rank, heartbeat, timeout, optimizer_instances=instances, context_inner=inner), device


def _end_orphan(message: str) -> NoReturn:
    """End this rank at once: whoever could wait for it is gone, and a job started in its place wants its folders."""
    log.error("this rank ends: %s", message)
    os._exit(1)


def hold_folders(run: RunConfig, groups: Groups, held: ExitStack) -> None:
    """Let no other job write to --save and --save-hf until `held` is closed. Collective over the world.

    The first thing a run writes, so it also finds out whether it can. Raises ConfigError and CheckpointError.
    """

    def hold_all() -> None:
        for flag, folder in (("--save", run.checkpoint.save), ("--save-hf", run.checkpoint.save_hf)):
            if folder is None:
                continue
            try:
                held.enter_context(hold(Path(folder)))
            except OSError as error:
                raise ConfigError(
                    f"{flag} {folder} cannot be written ({error.strerror}); give another folder"
                ) from error

    together(groups.world, hold_all if groups.rank == 0 and not run.train.skip_train else lambda: None)


def open_heartbeat_files(run: RunConfig, groups: Groups) -> None:
    """Keep a file of every rank's phase under --heartbeat-dir or --save, if one is given. Collective over the world.

    Raises ConfigError when it cannot be written.
    """
    save = run.checkpoint.save
    flag = f"--heartbeat-dir {run.parallel.heartbeat_dir}" if run.parallel.heartbeat_dir else f"--save {save}"
    directory = run.parallel.heartbeat_dir or (f"{save}/heartbeat" if save else None)

    def write() -> None:
        try:
            if directory:
                groups.heartbeat.write_to(Path(directory))
        except OSError as error:
            raise ConfigError(f"{flag} cannot be written ({error.strerror}); give another folder") from error

    together(groups.world, write)


def together(group: Group, work: Callable[[], T]) -> T:
    """Run `work` on every rank; what the user can mend on any of them is raised on all, so that none waits for others."""
    result: T | None = None
    error: UserError | None = None
    try:
        result = work()
    except Exception as caught:
        error = as_user_error(caught)
        if error is None:
            raise
        error.on_all_ranks = True
    failures = gather_objects(str(error) if error else None, group)
    for rank, message in enumerate(failures):
        if message is not None:
            raise error or UserError(f"on rank {group.ranks[rank]}: {message}")
    return result  # type: ignore[return-value]


def with_vocabulary(run: RunConfig, tokenizer_vocab_size: int, checkpoint: Path | None) -> RunConfig:
    """The run with the model's vocabulary and position range filled in, checked against the tokenizer.

    A vocabulary that nobody gave is that of the checkpoint that is loaded, or else the tokenizer's, and padding that
    nobody gave is the checkpoint's. That of Megatron-LM's depends on its layout: --padded-vocab-size alone overrides it.
    """
    saved = None if checkpoint is None else _saved_model(checkpoint)
    size, origin = run.model.vocab_size, "of the flags"
    if size is None and saved is not None:
        size, origin = saved.vocab_size, "of the checkpoint"
    if size is None:
        size, origin = tokenizer_vocab_size, "of the tokenizer"
    positions = run.model.max_position_embeddings or run.data.seq_length
    model = dataclasses.replace(run.model, vocab_size=size, max_position_embeddings=positions)
    if saved is not None and "mask_padded_vocabulary" not in run.given:
        model = dataclasses.replace(model, mask_padded_vocabulary=saved.mask_padded_vocabulary)
    asked = {"fixed_padded_vocab_size"}
    if checkpoint is not None and not is_foreign(checkpoint):
        asked.add("make_vocab_size_divisible_by")  # which Megatron-LM multiplies by its tensor-parallel size
    if saved is not None and not run.given & asked:
        model = dataclasses.replace(model, fixed_padded_vocab_size=saved.fixed_padded_vocab_size)
    check_vocabulary(model, run.parallel, tokenizer_vocab_size)
    log.info(
        "vocabulary: %d tokens (%s), padded to %d%s; the tokenizer has %d",
        *(size, origin, model.padded_vocab_size),
        "" if model.mask_padded_vocabulary else " which all take part in the softmax",
        tokenizer_vocab_size,
    )
    return dataclasses.replace(run, model=model)


def _saved_model(checkpoint: Path) -> ModelConfig | None:
    try:
        return saved_model_config(checkpoint)
    except CheckpointError:
        return None  # loading it will say what is wrong, and which one is whole


def build_model(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    kernels: Kernels,
    rng: RngTracker,
    stages: Sequence[Stage] | None = None,
    overlap: Plain = PLAIN,
    cp_trace: Trace = UNTRACED,
) -> GPTModel:
    """This rank's stages of the decoder, uninitialised; default all of it. With LoRA all but the adapters is frozen."""
    return build_gpt(shared_arguments(run, groups, device, kernels, rng, overlap, cp_trace), stages)


def shared_arguments(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    kernels: Kernels,
    rng: RngTracker,
    overlap: Plain,
    cp_trace: Trace,
) -> Build:
    """What all layers of the model are built with."""
    sequence_parallel = run.parallel.sequence_parallel and groups.tp.size > 1
    assert run.model.num_layers
    comm_types = attention_comm_types(run.parallel, run.model.num_layers)
    return Build(
        run.model, groups, sequence_parallel, kernels, rng, device, overlap, comm_types, cp_trace, run.recompute
    )


def build_gpt(shared: Build, stages: Sequence[Stage] | None) -> GPTModel:
    """See build_model."""
    model = GPTModel(shared, stages)
    if shared.config.lora_rank:
        freeze_all_but_adapters(local_parameters(model))
    return model


def initial_weights(run: RunConfig, parameters: dict[str, Parameter], groups: Groups, *, has_checkpoint: bool) -> None:
    """Weights that depend on the seed, or those of --load-hf and --load-adapter; a checkpoint is loaded over them later.

    Raises ConfigError for adapters of a model that nobody trained.
    """
    adapters = {name: parameter for name, parameter in parameters.items() if is_adapter(name)}
    if has_checkpoint:
        if run.checkpoint.load_adapter:
            return _load_adapter(run, run.checkpoint.load_adapter, adapters, groups)
        return initialize({n: p for n, p in parameters.items() if p.requires_grad}, run.train.seed)
    if run.checkpoint.load_hf:
        _load_hf(run, run.checkpoint.load_hf, {n: p for n, p in parameters.items() if n not in adapters}, groups)
        if run.checkpoint.load_adapter:
            return _load_adapter(run, run.checkpoint.load_adapter, adapters, groups)
        return initialize(adapters, run.train.seed)
    if run.model.lora_rank:
        raise ConfigError(
            f"--lora-rank {run.model.lora_rank} adapts a model that is trained already, and "
            f"{f'--load {run.checkpoint.load} holds none' if run.checkpoint.load else 'none is given'}; give "
            "--load-hf, --pretrained-checkpoint or --load a trained model"
        )
    initialize(parameters, run.train.seed)


def _load_hf(run: RunConfig, folder: str, parameters: dict[str, Parameter], groups: Groups) -> None:
    source = together(groups.world, lambda: HFSource(Path(folder), run.checkpoint.load_adapter))
    _fill(folder, source, parameters, groups)


def _load_adapter(run: RunConfig, folder: str, adapters: dict[str, Parameter], groups: Groups) -> None:
    base = dataclasses.replace(run.model, lora_rank=None)
    _fill(folder, together(groups.world, lambda: AdapterSource(Path(folder), base)), adapters, groups)


def _fill(folder: str, source: Source, parameters: dict[str, Parameter], groups: Groups) -> None:
    with groups.heartbeat.phase("load-checkpoint"):
        together(groups.world, lambda: fill(parameters, source))
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}
    log.info("loaded %s, stored as %s, as %s", folder, str(source.dtype).removeprefix("torch."), ", ".join(dtypes))


def build_schedule(run: RunConfig, batches: BatchSchedule) -> ParamSchedule:
    """Learning rate and weight decay, in samples with --train-samples and in iterations otherwise."""
    if run.train.train_samples:
        return ParamSchedule(run.schedule, run.optimizer, run.train.train_samples, "samples")
    return ParamSchedule(run.schedule, run.optimizer, batches.total_iterations, "iterations")


def build_readers(trainer: Trainer, eod: int) -> Splits[BatchReader | None]:
    """Readers that continue where the state says. Only tp rank 0 of a replica opens data; all ranks get a reader."""
    run, groups, state = trainer.run, trainer.groups, trainer.state
    assert run.model.vocab_size
    sizes = dataset_sizes(trainer)
    reads = groups.tp.rank == 0
    vocab_size = run.model.vocab_size

    def open_all() -> Splits[SampleDataset | None]:
        if not reads:
            return Splits(None, None, None)
        return build_datasets(run.data, sizes, run.train.seed, vocab_size)

    # One rank builds the index files while the others wait, then the others find them.
    first = together(groups.world, lambda: open_all() if groups.rank == 0 else None)
    datasets = together(groups.world, lambda: first or open_all())
    # Which splits exist is the same everywhere: rank 0 always reads.
    exist = gather_objects([dataset is not None for _, dataset in datasets.items()], groups.world)[0]
    consumed = (state.consumed_samples, 0 if run.train.skip_train else state.consumed_valid_samples, 0)

    def reader(dataset: SampleDataset | None, samples: int, exists: bool) -> BatchReader | None:
        return _reader(trainer, dataset, samples, eod) if exists else None

    train, valid, test = (
        reader(dataset, samples, exists)
        for (_, dataset), samples, exists in zip(datasets.items(), consumed, exist, strict=True)
    )
    return Splits(train, valid, test)


def _reader(trainer: Trainer, dataset: SampleDataset | None, consumed: int, eod: int) -> BatchReader:
    run, mesh = trainer.run, trainer.groups.mesh
    assert run.train.micro_batch_size
    loader = None
    if dataset is not None:
        loader = build_loader(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=run.train.micro_batch_size,
            dp_rank=trainer.groups.dp.rank,
            dp_size=mesh.dp,
            num_workers=run.data.num_workers,
            seed=run.train.seed,
            cyclic=run.data.data_order == "megatron" and run.data.dataloader_type == "cyclic",
            sharding=run.data.data_sharding,
            pin_memory=trainer.device.type == "cuda",
        )
    return BatchReader(
        loader,
        run.data,
        eod=eod,
        micro_batch_size=run.train.micro_batch_size,
        groups=trainer.groups,
        device=trainer.device,
    )


def _shape_from(asked: ModelConfig, saved: ModelConfig) -> ModelConfig:
    """The saved model in this run's precision and with its kernels: those are not part of the model's shape."""
    return dataclasses.replace(saved, **{name: getattr(asked, name) for name in RUNTIME_FIELDS})


def _evaluation_only(run: RunConfig) -> RunConfig:
    """With --skip-train the length and the learning rate need not be given; the schedule is built and never asked."""
    train = dataclasses.replace(run.train, train_iters=None if run.train.train_samples else run.train.train_iters or 1)
    return dataclasses.replace(run, train=train, schedule=ScheduleConfig(lr=1.0, lr_decay_style="constant"))


def _backend(run: RunConfig, groups: Groups, device: torch.device) -> str | None:
    """What carries messages; None in a world of one."""
    return backend_for(device, run.parallel.distributed_backend) if groups.world.size > 1 else None


def _announce(trainer: Trainer, kernels: Kernels, tp_overlap: str, tp_overlap_why: str, recomputed: str) -> None:
    run, groups, buckets = trainer.run, trainer.groups, trainer.data_parallel.buckets
    dtypes = {bucket.dtype for bucket in buckets}
    count = sum(math.prod(p.info.shape) for p in trainer.parameters.values())
    facts = Facts(
        tp=groups.mesh.tp,
        dp=groups.mesh.dp,
        device=trainer.device.type,
        backend=_backend(run, groups, trainer.device),
        attention_choice=kernels.attention_choice,
        block_choice=kernels.block_choice,
        fusion_missing=kernels.fusion_missing,
        upcast_products=any(slow_half(trainer.device, dtype) for dtype in dtypes),
        separate_main_grads=dtypes != {torch.float32},
        buckets=len(buckets),
        shards=groups.shard.size,
        tp_overlap=tp_overlap,
        tp_overlap_why=tp_overlap_why,
        far_chunks=trainer.optimizer.far_chunks,
        recomputed=recomputed,
    )
    rows = features(run, facts)
    log.info("%s", format_table(rows if run.logging.print_flags else worth_a_line(rows)))
    log.info(" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): %d", count)
    sharding = trainer.data_parallel.settings.shards
    frozen = sum(math.prod(p.info.shape) for p in trainer.parameters.values() if not p.requires_grad)
    if frozen:
        share = 100 * (count - frozen) / count
        log.info(
            "training %d of them, %.2f %%: adapters of %s", count - frozen, share, " ".join(run.model.lora_projections)
        )
    away = [parameter for bucket in buckets if bucket.home is not None for parameter in bucket.parameters.values()]
    far_weights = sum(math.prod(parameter.info.shape) for parameter in away)
    footprint = weight_and_optimizer_footprint(
        count - frozen, run.model.dtype_name, run.optimizer, groups.shard.size, sharding, frozen=frozen, far=far_weights
    )
    log.info(format_footprint(footprint))
    if far_weights:
        log.info("weights of %d parameters wait in far memory", far_weights)
    if trainer.optimizer.far_bytes:
        near, far = trainer.optimizer.device_bytes / MIB, trainer.optimizer.far_bytes / MIB
        log.info("of its state and buffers the optimizer has %.2f MB on the device and %.2f MB away from it", near, far)
