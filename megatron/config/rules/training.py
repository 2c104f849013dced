"""Rules about the length of the run, its batches, schedule and optimizer. See rules/model.py for the form of a rule."""

from __future__ import annotations

from megatron.base.errors import ConfigError
from megatron.config.batch_schedule import not_whole, unit_of
from megatron.config.batch_steps import FLAG, parse_steps
from megatron.config.data_parallel import EVERY, splits_backward
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig

MOST_MICROBATCHES = 65536  # per step: each is an action of the schedule, which is built before the first step


def one_length(run: RunConfig, world_size: int) -> str | None:
    """The length of a run is in steps or in samples; an evaluation needs neither."""
    iters, samples = run.train.train_iters, run.train.train_samples
    if iters is not None and samples is not None:
        return f"--train-iters {iters} and --train-samples {samples} exclude each other; give one of them"
    if iters is None and samples is None and not run.train.skip_train:
        return "the length of the run is missing; give --train-iters or --train-samples"
    return None


def learning_rate_is_given(run: RunConfig, world_size: int) -> str | None:
    """There is no default learning rate."""
    if run.schedule.lr is None and not run.train.skip_train:
        return "the learning rate is missing; give --lr"
    return None


def step_schedule_is_alone(run: RunConfig, world_size: int) -> str | None:
    """A batch-size schedule determines the batch of every step, so no other flag may."""
    t = run.train
    if t.step_batch_size_schedule is None:
        return None
    try:
        parse_steps(t.step_batch_size_schedule, run.data.seq_length)
    except ConfigError as error:
        return str(error)
    if t.global_batch_size is not None:
        return f"{FLAG} gives every batch size and --global-batch-size {t.global_batch_size} another one; remove one of them"
    if t.rampup_batch_size is not None:
        ramp = " ".join(map(str, t.rampup_batch_size))
        return f"{FLAG} gives every batch size and --rampup-batch-size {ramp} others; remove one of them"
    return None


def batches_are_whole(run: RunConfig, world_size: int) -> str | None:
    """Every global batch size of the run is a whole number of microbatches per replica."""
    t, dp = run.train, mesh_of(run.parallel, world_size).dp
    assert t.micro_batch_size
    size, name = t.final_global_batch_size or 0, "--global-batch-size"
    if t.step_batch_size_schedule is not None:
        name = f"{FLAG} ends with"
    if problem := not_whole(name, size, t.micro_batch_size, dp):
        return problem
    microbatches = size // (t.micro_batch_size * dp)
    if microbatches > MOST_MICROBATCHES:
        return (
            f"{name} {size} makes {microbatches} microbatches per step of {unit_of(t.micro_batch_size, dp)}, more than "
            f"{MOST_MICROBATCHES}; lower it, raise --micro-batch-size, or use more processes"
        )
    for number, name in zip(t.rampup_batch_size or (), ("START", "INCREMENT")):
        if problem := not_whole(f"--rampup-batch-size {name}", number, t.micro_batch_size, dp):
            return problem
    return None


def rampup_reaches_batch_size(run: RunConfig, world_size: int) -> str | None:
    """The ramp increases from START to the global batch size in whole increments."""
    ramp, end = run.train.rampup_batch_size, run.train.global_batch_size
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


def sharding_is_consistent(run: RunConfig, world_size: int) -> str | None:
    """The flags that select the sharded state do not contradict each other."""
    p = run.parallel
    shards, mode = p.data_parallel_sharding_strategy, p.grad_reduce_mode
    if shards == "no_shard" and (p.use_distributed_optimizer or p.overlapped_distributed_optimizer):
        name = (
            "--overlapped-distributed-optimizer"
            if p.overlapped_distributed_optimizer
            else "--use-distributed-optimizer"
        )
        return (
            f"{name} shards the optimizer and --data-parallel-sharding-strategy no_shard does not; remove one of them"
        )
    if shards == "optim" and mode == "every-microbatch":
        return (
            "--grad-reduce-mode every-microbatch keeps only a shard of the gradient and --data-parallel-sharding-strategy "
            "optim keeps all of it; give optim_grads, or remove one of them"
        )
    if shards in ("optim_grads", "optim_grads_params") and mode not in (None, "every-microbatch"):
        return (
            f"--data-parallel-sharding-strategy {shards} keeps only a shard of the gradient, so it is reduced after every "
            f"microbatch; remove --grad-reduce-mode {mode}, or give optim"
        )
    return None


def pipeline_carries_sharding(run: RunConfig, world_size: int) -> str | None:
    """Some sharding and reduction modes are incompatible with a pipeline."""
    p, settings = run.parallel, run.data_parallel_settings()
    if p.pipeline_model_parallel_size == 1:
        return None
    if settings.shards == "optim_grads_params":
        return (
            "--data-parallel-sharding-strategy optim_grads_params gathers parameters for every microbatch of every stage, "
            f"and --pipeline-model-parallel-size {p.pipeline_model_parallel_size} has many of both; give optim_grads"
        )
    if settings.mode == EVERY and splits_backward(p):
        return (
            f"--pipeline-schedule {p.pipeline_schedule} computes weight gradients apart, so they are not reduced after "
            "every microbatch; give --grad-reduce-mode last-microbatch with the strategy optim, or --pipeline-schedule 1f1b"
        )
    return None


def instances_divide_replicas(run: RunConfig, world_size: int) -> str | None:
    """Every instance of the sharded optimizer has equally many ranks."""
    mesh, instances = mesh_of(run.parallel, world_size), run.parallel.num_distributed_optimizer_instances
    ranks = mesh.dp * mesh.cp
    if ranks % instances:
        return (
            f"--num-distributed-optimizer-instances {instances} does not divide data-parallel size {mesh.dp} x "
            f"context-parallel size {mesh.cp} = {ranks}; give a divisor of {ranks}"
        )
    return None


def lengths_are_in_one_unit(run: RunConfig, world_size: int) -> str | None:
    """The schedule and the length of the run have the same unit: iterations or samples."""
    s = run.schedule
    iterations = {
        "--lr-decay-iters": s.lr_decay_iters,
        "--lr-wsd-decay-iters": s.lr_wsd_decay_iters,
        "--lr-warmup-iters": s.lr_warmup_iters or None,
    }
    samples = {
        "--lr-decay-samples": s.lr_decay_samples,
        "--lr-wsd-decay-samples": s.lr_wsd_decay_samples,
        "--lr-warmup-samples": s.lr_warmup_samples or None,
    }
    for length, wrong, old, new in (
        (run.train.train_iters, samples, "-samples", "-iters"),
        (run.train.train_samples, iterations, "-iters", "-samples"),
    ):
        for name, value in wrong.items():
            if length is not None and value is not None:
                return f"{name} {value} does not go with --train{new} {length}; give {name.replace(old, new)} instead"
    return None


def one_warmup(run: RunConfig, world_size: int) -> str | None:
    """The warm-up is a length or a fraction."""
    s = run.schedule
    length = s.lr_warmup_iters or s.lr_warmup_samples
    if s.lr_warmup_fraction is not None and length:
        name = "--lr-warmup-iters" if s.lr_warmup_iters else "--lr-warmup-samples"
        return f"--lr-warmup-fraction {s.lr_warmup_fraction} and {name} {length} exclude each other; give one of them"
    return None


def schedule_fits(run: RunConfig, world_size: int) -> str | None:
    """The warm-up ends before the decay does, and WSD's last phase begins after the warm-up."""
    s = run.schedule
    in_samples = run.train.train_samples is not None
    unit = "samples" if in_samples else "iters"
    whole = run.train.train_samples or run.train.train_iters
    decay = (s.lr_decay_samples if in_samples else s.lr_decay_iters) or whole
    last = s.lr_wsd_decay_samples if in_samples else s.lr_wsd_decay_iters
    if decay is None:
        return None
    warmup = s.lr_warmup_samples or s.lr_warmup_iters or (s.lr_warmup_fraction or 0.0) * decay
    if warmup >= decay:
        return (
            f"the warm-up of {warmup:g} {unit} is not shorter than the decay length of {decay}; shorten "
            f"--lr-warmup-{unit} or raise --lr-decay-{unit}"
        )
    if s.lr_decay_style != "WSD":
        return None
    if last is None:
        return f"--lr-decay-style WSD needs the length of its decay phase; give --lr-wsd-decay-{unit}"
    if warmup + last > decay:
        return (
            f"warm-up {warmup:g} + --lr-wsd-decay-{unit} {last} is longer than the decay length of {decay} {unit}; "
            "shorten one of them"
        )
    return None


def learning_rates_are_ordered(run: RunConfig, world_size: int) -> str | None:
    """The peak is the largest learning rate."""
    s = run.schedule
    if s.lr is None:
        return None
    for name, value in (("--min-lr", s.min_lr), ("--lr-warmup-init", s.lr_warmup_init)):
        if value > s.lr:
            return f"{name} {value} is above --lr {s.lr}; lower it"
    return None


def decoupled_learning_rates_are_ordered(run: RunConfig, world_size: int) -> str | None:
    """The peak for the word embeddings and the output layer is not below their minimum, if there is a decay."""
    s = run.schedule
    if s.decoupled_lr is None or s.lr_decay_style == "constant" or s.decoupled_minimum <= s.decoupled_lr:
        return None
    if s.decoupled_min_lr is None:
        return (
            f"--min-lr {s.min_lr} is above --decoupled-lr {s.decoupled_lr}, whose minimum it is, too; give a lower "
            "--decoupled-min-lr"
        )
    return f"--decoupled-min-lr {s.decoupled_min_lr} is above --decoupled-lr {s.decoupled_lr}; lower it"


def weight_decay_ramp_is_whole(run: RunConfig, world_size: int) -> str | None:
    """A ramp has both ends; a constant weight decay has none."""
    o = run.optimizer
    start, end = o.start_weight_decay, o.end_weight_decay
    style = o.weight_decay_incr_style
    if style == "constant":
        given = [n for n, v in (("--start-weight-decay", start), ("--end-weight-decay", end)) if v is not None]
        fix = "give --weight-decay-incr-style linear or cosine, or --weight-decay instead"
        return f"{' and '.join(given)} has no effect on a constant weight decay; {fix}" if given else None
    if start is None or end is None:
        return f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; give both"
    if start > end:
        return f"--start-weight-decay {start} is above --end-weight-decay {end}; lower it"
    return None


def loss_scale_has_room(run: RunConfig, world_size: int) -> str | None:
    """The dynamic loss scale starts at or above its floor."""
    o = run.optimizer
    if run.model.fp16 and o.loss_scale is None and o.initial_loss_scale < o.min_loss_scale:
        return f"--initial-loss-scale {o.initial_loss_scale:g} is below --min-loss-scale {o.min_loss_scale:g}; raise it"
    return None


def profile_has_steps(run: RunConfig, world_size: int) -> str | None:
    """A timeline covers at least one step."""
    start, end = run.logging.profile_step_start, run.logging.profile_step_end
    if run.logging.profile_timeline is not None and end <= start:
        return f"--profile-step-end {end} is not after --profile-step-start {start}; raise it"
    return None


def skip_train_evaluates(run: RunConfig, world_size: int) -> str | None:
    """A run that neither trains nor evaluates does nothing."""
    if run.train.skip_train and run.eval.eval_iters == 0:
        return "--skip-train with --eval-iters 0 leaves nothing to do; raise --eval-iters"
    return None


RULES = (
    one_length,
    learning_rate_is_given,
    step_schedule_is_alone,
    rampup_reaches_batch_size,
    batches_are_whole,
    sharding_is_consistent,
    pipeline_carries_sharding,
    instances_divide_replicas,
    lengths_are_in_one_unit,
    one_warmup,
    schedule_fits,
    learning_rates_are_ordered,
    decoupled_learning_rates_are_ordered,
    weight_decay_ramp_is_whole,
    loss_scale_has_room,
    profile_has_steps,
    skip_train_evaluates,
)
