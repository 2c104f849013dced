"""Rules about the length of the run, its batches, schedule and optimizer."""

from __future__ import annotations

from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.batch_schedule import not_whole, unit_of
from megatron.config.data import DataConfig
from megatron.config.data_parallel import EVERY, data_parallel_settings, splits_backward
from megatron.config.mesh import mesh_of
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig
from megatron.config.train import BATCH_STEPS_FLAG, EvalConfig, LoggingConfig, TrainConfig, parse_steps

MOST_MICROBATCHES = 65536  # per step: each is an action of the schedule, which is built before the first step


def one_length(train: TrainConfig) -> str | None:
    """The length of a run is in steps or in samples; an evaluation needs neither."""
    iters, samples = train.train_iters, train.train_samples
    if iters is not None and samples is not None:
        return f"--train-iters {iters} and --train-samples {samples} exclude each other; give one of them"
    if iters is None and samples is None and not train.skip_train:
        return "the length of the run is missing; give --train-iters or --train-samples"
    return None


def learning_rate_is_given(schedule: ScheduleConfig, train: TrainConfig) -> str | None:
    """There is no default learning rate."""
    if schedule.lr is None and not train.skip_train:
        return "the learning rate is missing; give --lr"
    return None


def step_schedule_is_alone(train: TrainConfig, data: DataConfig) -> str | None:
    """A batch-size schedule determines the batch of every step, so no other flag may."""
    if train.step_batch_size_schedule is None:
        return None
    try:
        parse_steps(train.step_batch_size_schedule, data.seq_length)
    except ConfigError as error:
        return str(error)
    if train.global_batch_size is not None:
        size = train.global_batch_size
        return (
            f"{BATCH_STEPS_FLAG} gives every batch size and --global-batch-size {size} another one; remove one of them"
        )
    if train.rampup_batch_size is not None:
        ramp = " ".join(map(str, train.rampup_batch_size))
        return f"{BATCH_STEPS_FLAG} gives every batch size and --rampup-batch-size {ramp} others; remove one of them"
    return None


def batches_are_whole(train: TrainConfig, parallel: ParallelConfig, world_size: int) -> str | None:
    """Every global batch size of the run is a whole number of microbatches per replica."""
    dp = mesh_of(parallel, world_size).dp
    assert train.micro_batch_size
    size, name = train.final_global_batch_size or 0, "--global-batch-size"
    if train.step_batch_size_schedule is not None:
        name = f"{BATCH_STEPS_FLAG} ends with"
    if problem := not_whole(name, size, train.micro_batch_size, dp):
        return problem
    microbatches = size // (train.micro_batch_size * dp)
    if microbatches > MOST_MICROBATCHES:
        return (
            f"{name} {size} makes {microbatches} microbatches per step of {unit_of(train.micro_batch_size, dp)}, more "
            f"than {MOST_MICROBATCHES}; lower it, raise --micro-batch-size, or use more processes"
        )
    for number, name in zip(train.rampup_batch_size or (), ("START", "INCREMENT")):
        if problem := not_whole(f"--rampup-batch-size {name}", number, train.micro_batch_size, dp):
            return problem
    return None


def elastic_batch_is_given(train: TrainConfig, parallel: ParallelConfig) -> str | None:
    """The samples of a step do not follow the number of processes where that changes."""
    if not parallel.elastic_world or train.final_global_batch_size is not None:
        return None
    return (
        "--elastic-world keeps the samples of a step while the number of processes changes, and without "
        "--global-batch-size they are --micro-batch-size x the number of replicas; give --global-batch-size"
    )


def elastic_order_is_of_no_world(data: DataConfig, parallel: ParallelConfig) -> str | None:
    """The order of samples does not follow the number of processes where that changes."""
    if not parallel.elastic_world or data.data_order != "megatron" or data.dataloader_type != "cyclic":
        return None
    return (
        "--elastic-world changes the number of replicas, on which the order of samples depends with --data-order "
        "megatron and --dataloader-type cyclic; remove one of the three"
    )


def rampup_reaches_batch_size(train: TrainConfig) -> str | None:
    """The ramp increases from START to the global batch size in whole increments."""
    ramp, end = train.rampup_batch_size, train.global_batch_size
    if ramp is None:
        return None
    if len(ramp) != 3:
        return f"--rampup-batch-size takes START INCREMENT SAMPLES, got {len(ramp)} numbers; give three"
    if end is None:
        return "--rampup-batch-size needs to know where it ends; give --global-batch-size"
    start, increment, _ = ramp
    if start >= end:
        return f"--rampup-batch-size START {start} must be below --global-batch-size {end}; lower it or remove the ramp"
    if (end - start) % increment:
        return (
            f"--rampup-batch-size goes from {start} to --global-batch-size {end}, which is not a whole number of "
            f"INCREMENT {increment}; change one of them"
        )
    return None


def sharding_is_consistent(parallel: ParallelConfig) -> str | None:
    """The flags that select the sharded state do not contradict each other."""
    shards, mode = parallel.data_parallel_sharding_strategy, parallel.grad_reduce_mode
    if shards == "no_shard" and (parallel.use_distributed_optimizer or parallel.overlapped_distributed_optimizer):
        name = (
            "--overlapped-distributed-optimizer"
            if parallel.overlapped_distributed_optimizer
            else "--use-distributed-optimizer"
        )
        return (
            f"{name} shards the optimizer and --data-parallel-sharding-strategy no_shard does not; remove one of them"
        )
    if shards == "optim" and mode == "every-microbatch":
        return (
            "--grad-reduce-mode every-microbatch keeps only a shard of the gradient and "
            "--data-parallel-sharding-strategy optim keeps all of it; give optim_grads, or remove one of them"
        )
    if shards in ("optim_grads", "optim_grads_params") and mode not in (None, "every-microbatch"):
        return (
            f"--data-parallel-sharding-strategy {shards} keeps only a shard of the gradient, so it is reduced after "
            f"every microbatch; remove --grad-reduce-mode {mode}, or give optim"
        )
    return None


def pipeline_carries_sharding(parallel: ParallelConfig) -> str | None:
    """Some sharding and reduction modes are incompatible with a pipeline."""
    settings = data_parallel_settings(parallel)
    if parallel.pipeline_model_parallel_size == 1:
        return None
    if settings.shards == "optim_grads_params":
        return (
            "--data-parallel-sharding-strategy optim_grads_params gathers parameters for every microbatch of every "
            f"stage, and --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} has many of both; give "
            "optim_grads"
        )
    if settings.mode == EVERY and splits_backward(parallel):
        return (
            f"--pipeline-schedule {parallel.pipeline_schedule} computes weight gradients apart, so they are not "
            "reduced after every microbatch; give --grad-reduce-mode last-microbatch --data-parallel-sharding-strategy "
            "optim, or --pipeline-schedule 1f1b"
        )
    return None


def instances_divide_replicas(parallel: ParallelConfig, world_size: int) -> str | None:
    """Every instance of the sharded optimizer has equally many ranks."""
    mesh, instances = mesh_of(parallel, world_size), parallel.num_distributed_optimizer_instances
    ranks = mesh.dp * mesh.cp
    if ranks % instances:
        return (
            f"--num-distributed-optimizer-instances {instances} does not divide data-parallel size {mesh.dp} x "
            f"context-parallel size {mesh.cp} = {ranks}; give a divisor of {ranks}"
        )
    return None


def lengths_are_in_one_unit(schedule: ScheduleConfig, train: TrainConfig) -> str | None:
    """The schedule and the length of the run have the same unit: iterations or samples."""
    iterations = {
        "--lr-decay-iters": schedule.lr_decay_iters,
        "--lr-wsd-decay-iters": schedule.lr_wsd_decay_iters,
        "--lr-warmup-iters": schedule.lr_warmup_iters or None,
    }
    samples = {
        "--lr-decay-samples": schedule.lr_decay_samples,
        "--lr-wsd-decay-samples": schedule.lr_wsd_decay_samples,
        "--lr-warmup-samples": schedule.lr_warmup_samples or None,
    }
    for length, wrong, old, new in (
        (train.train_iters, samples, "-samples", "-iters"),
        (train.train_samples, iterations, "-iters", "-samples"),
    ):
        for name, value in wrong.items():
            if length is not None and value is not None:
                return f"{name} {value} does not go with --train{new} {length}; give {name.replace(old, new)} instead"
    return None


def one_warmup(schedule: ScheduleConfig) -> str | None:
    """The warm-up is a length or a fraction."""
    length = schedule.lr_warmup_iters or schedule.lr_warmup_samples
    if schedule.lr_warmup_fraction is not None and length:
        name = "--lr-warmup-iters" if schedule.lr_warmup_iters else "--lr-warmup-samples"
        return (
            f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and {name} {length} exclude each other; give one of "
            "them"
        )
    return None


def schedule_fits(schedule: ScheduleConfig, train: TrainConfig) -> str | None:
    """The warm-up ends before the decay does, and WSD's last phase begins after the warm-up."""
    in_samples = train.train_samples is not None
    unit = "samples" if in_samples else "iters"
    whole = train.train_samples or train.train_iters
    decay = (schedule.lr_decay_samples if in_samples else schedule.lr_decay_iters) or whole
    last = schedule.lr_wsd_decay_samples if in_samples else schedule.lr_wsd_decay_iters
    if decay is None:
        return None
    warmup = schedule.lr_warmup_samples or schedule.lr_warmup_iters or (schedule.lr_warmup_fraction or 0.0) * decay
    if warmup >= decay:
        return (
            f"the warm-up of {warmup:g} {unit} is not shorter than the decay length of {decay}; shorten "
            f"--lr-warmup-{unit} or raise --lr-decay-{unit}"
        )
    if schedule.lr_decay_style != "WSD":
        return None
    if last is None:
        return f"--lr-decay-style WSD needs the length of its decay phase; give --lr-wsd-decay-{unit}"
    if warmup + last > decay:
        return (
            f"warm-up {warmup:g} + --lr-wsd-decay-{unit} {last} is longer than the decay length of {decay} {unit}; "
            "shorten one of them"
        )
    return None


def learning_rates_are_ordered(schedule: ScheduleConfig) -> str | None:
    """The peak is the largest learning rate."""
    if schedule.lr is None:
        return None
    for name, value in (("--min-lr", schedule.min_lr), ("--lr-warmup-init", schedule.lr_warmup_init)):
        if value > schedule.lr:
            return f"{name} {value} is above --lr {schedule.lr}; lower it"
    return None


def decoupled_learning_rates_are_ordered(schedule: ScheduleConfig) -> str | None:
    """The peak for the word embeddings and the output layer is not below their minimum, if there is a decay."""
    peak, minimum = schedule.decoupled_lr, schedule.decoupled_minimum
    if peak is None or schedule.lr_decay_style == "constant" or minimum <= peak:
        return None
    if schedule.decoupled_min_lr is None:
        return (
            f"--min-lr {minimum} is above --decoupled-lr {peak}, whose minimum it is, too; give a lower "
            "--decoupled-min-lr"
        )
    return f"--decoupled-min-lr {minimum} is above --decoupled-lr {peak}; lower it"


def weight_decay_ramp_is_whole(optimizer: OptimizerConfig) -> str | None:
    """A ramp has both ends; a constant weight decay has none."""
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    style = optimizer.weight_decay_incr_style
    if style == "constant":
        flags = [n for n, v in (("--start-weight-decay", start), ("--end-weight-decay", end)) if v is not None]
        fix = "give --weight-decay-incr-style with both ends, or --weight-decay instead"
        return f"{' and '.join(flags)} has no effect on a constant weight decay; {fix}" if flags else None
    if start is None or end is None:
        return f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; give both"
    if start > end:
        return f"--start-weight-decay {start} is above --end-weight-decay {end}; lower it"
    return None


def loss_scale_has_room(optimizer: OptimizerConfig, model: ModelConfig) -> str | None:
    """The dynamic loss scale starts at or above its floor."""
    start, floor = optimizer.initial_loss_scale, optimizer.min_loss_scale
    if model.fp16 and optimizer.loss_scale is None and start < floor:
        return f"--initial-loss-scale {start:g} is below --min-loss-scale {floor:g}; raise it"
    return None


def profile_has_steps(logging: LoggingConfig) -> str | None:
    """A timeline covers at least one step."""
    start, end = logging.profile_step_start, logging.profile_step_end
    if logging.profile_timeline is not None and end <= start:
        return f"--profile-step-end {end} is not after --profile-step-start {start}; raise it"
    return None


def skip_train_evaluates(train: TrainConfig, evaluation: EvalConfig) -> str | None:
    """A run that neither trains nor evaluates does nothing."""
    if train.skip_train and evaluation.eval_iters == 0:
        return "--skip-train with --eval-iters 0 leaves nothing to do; raise --eval-iters"
    return None


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules about the length of a run, its batches, schedule and optimizer."""
    return [
        partial(one_length, run.train),
        partial(learning_rate_is_given, run.schedule, run.train),
        partial(step_schedule_is_alone, run.train, run.data),
        partial(rampup_reaches_batch_size, run.train),
        partial(batches_are_whole, run.train, run.parallel, world_size),
        partial(elastic_batch_is_given, run.train, run.parallel),
        partial(elastic_order_is_of_no_world, run.data, run.parallel),
        partial(sharding_is_consistent, run.parallel),
        partial(pipeline_carries_sharding, run.parallel),
        partial(instances_divide_replicas, run.parallel, world_size),
        partial(lengths_are_in_one_unit, run.schedule, run.train),
        partial(one_warmup, run.schedule),
        partial(schedule_fits, run.schedule, run.train),
        partial(learning_rates_are_ordered, run.schedule),
        partial(decoupled_learning_rates_are_ordered, run.schedule),
        partial(weight_decay_ramp_is_whole, run.optimizer),
        partial(loss_scale_has_room, run.optimizer, run.model),
        partial(profile_has_steps, run.logging),
        partial(skip_train_evaluates, run.train, run.eval),
    ]
