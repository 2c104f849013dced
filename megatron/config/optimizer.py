"""Optimizer, learning-rate schedule, weight decay and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import BELOW_ONE, COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE
from megatron.config.update_rules import ADAM, HYBRID, RULES, SGD, RuleSpec, rule_name


def _rule(run: Any) -> str:
    return f"--optimizer is {run.optimizer.optimizer}"


def _no_scale(run: Any) -> str:
    return f"{run.model.dtype_name} training scales no loss"


def _style(run: Any) -> str:
    return f"--lr-decay-style is {run.schedule.lr_decay_style}"


_ADAM = Need(lambda run: run.optimizer.rule == ADAM, _rule, "give --optimizer adam")
_WEIGHT_DECAY_RAMP = Need(
    lambda run: run.optimizer.weight_decay_incr_style != "constant",
    "the weight decay is constant",
    "give --weight-decay-incr-style linear or cosine",
)
_DYNAMIC_LOSS_SCALE = Need(
    lambda run: run.model.fp16 and run.optimizer.loss_scale is None,
    lambda run: f"--loss-scale fixes it at {run.optimizer.loss_scale:g}" if run.model.fp16 else _no_scale(run),
    "train in --fp16 without --loss-scale",
)
_LR_DECAY = Need(lambda run: run.schedule.lr_decay_style != "constant", _style, "give another --lr-decay-style")
_WHOLE_MODEL = Need(lambda run: run.model.lora_rank is None, "--lora-rank trains adapters only", "remove --lora-rank")
_LR_DECAY_OR_WARMUP_FRACTION = Need(
    lambda run: run.schedule.lr_decay_style != "constant" or run.schedule.lr_warmup_fraction is not None,
    _style,
    "give another --lr-decay-style",
)
_WSD = Need(
    lambda run: run.schedule.lr_decay_style == "WSD", lambda run: f"{_style(run)}, not WSD", "give --lr-decay-style WSD"
)
_LOADED_SCHEDULE = Need(
    lambda run: run.checkpoint.may_continue and not run.checkpoint.finetune,
    lambda run: "--finetune loads no schedule" if run.checkpoint.may_continue else "nothing is loaded",
    "continue a run with --load",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update of parameters."""

    optimizer: str = flag(
        "adam",
        "update rule; adam is AdamW (decoupled weight decay); hybridadam is adam with --optimizer-cpu-offload and "
        "--optimizer-offload-policy auto",
        choices=(*RULES, HYBRID),
    )
    adam_beta1: float = flag(0.9, "decay of the mean of gradients", within=BELOW_ONE, needs=_ADAM)
    adam_beta2: float = flag(0.999, "decay of the mean of squared gradients", within=BELOW_ONE, needs=_ADAM)
    adam_eps: float = flag(1e-8, "term added to the denominator", within=POSITIVE, needs=_ADAM)
    sgd_momentum: float = flag(
        0.9,
        "momentum of sgd",
        within=BELOW_ONE,
        needs=Need(lambda run: run.optimizer.rule == SGD, _rule, "give --optimizer sgd"),
    )
    clip_grad: float = flag(1.0, "limit on the global gradient norm; 0 turns clipping off", within=NOT_NEGATIVE)
    use_precision_aware_optimizer: bool = flag(
        False,
        "allow optimizer state in bf16: --main-grads-dtype, --exp-avg-dtype, --exp-avg-sq-dtype, --main-params-dtype",
        needs=Need(
            # Megatron-LM's CPU offload does not work without this flag, so scripts give both.
            lambda run: (
                run.optimizer.has_bf16_state
                or run.optimizer_offload.optimizer_cpu_offload
                or run.optimizer.optimizer == HYBRID
            ),
            "all state is fp32",
            "give --main-grads-dtype bf16, --exp-avg-dtype bf16, --exp-avg-sq-dtype bf16 or --main-params-dtype bf16",
        ),
    )
    main_grads_dtype: str = flag(
        "fp32",
        "dtype that main gradients are kept in; with bf16 every sum is computed in fp32 and rounded at random",
        choices=("fp32", "bf16"),
    )
    exp_avg_dtype: str = flag("fp32", "dtype that adam's mean of gradients is stored in", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = flag(
        "fp32",
        "dtype that adam's mean of squares is stored in; bf16 is rounded at random",
        choices=("fp32", "bf16"),
    )
    main_params_dtype: str = flag(
        "fp32",
        "bf16 stores only the lower 16 bits of the fp32 masters, which complete the bf16 weights; the update is the "
        "same",
        choices=("fp32", "bf16"),
    )
    weight_decay: float = flag(
        0.01,
        "weight decay, on matrices only: not on biases and norm weights",
        within=NOT_NEGATIVE,
        needs=Need(
            lambda run: run.optimizer.weight_decay_incr_style == "constant",
            lambda run: (
                f"--weight-decay-incr-style {run.optimizer.weight_decay_incr_style} goes from --start-weight-decay to "
                "--end-weight-decay"
            ),
            "give --weight-decay-incr-style constant",
        ),
    )
    start_weight_decay: float | None = flag(
        None, "weight decay at the first step of a ramp", within=NOT_NEGATIVE, needs=_WEIGHT_DECAY_RAMP
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the end of a ramp", within=NOT_NEGATIVE, needs=_WEIGHT_DECAY_RAMP
    )
    weight_decay_incr_style: str = flag(
        "constant", "shape of the weight-decay ramp", choices=("constant", "linear", "cosine")
    )
    loss_scale: float | None = flag(
        None,
        "fixed fp16 loss scale; default dynamic",
        within=POSITIVE,
        needs=Need(lambda run: run.model.fp16, _no_scale, "add --fp16"),
    )
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", within=POSITIVE, needs=_DYNAMIC_LOSS_SCALE)
    min_loss_scale: float = flag(
        1.0, "the dynamic loss scale never falls below this", within=POSITIVE, needs=_DYNAMIC_LOSS_SCALE
    )
    loss_scale_window: int = flag(
        1000, "good steps after which the dynamic loss scale doubles", within=COUNT, needs=_DYNAMIC_LOSS_SCALE
    )
    hysteresis: int = flag(
        2,
        "overflows before the dynamic loss scale halves; a full good window resets the count",
        within=COUNT,
        needs=_DYNAMIC_LOSS_SCALE,
    )
    check_for_nan_in_loss_and_grad: bool = on_by_default(
        when_off="apply a step whose gradients hold NaN or infinity; by default it is skipped, with a log line",
        needs=Need(
            lambda run: not run.model.fp16 or run.optimizer.loss_scale is not None,
            "dynamic loss scaling has to find overflows",
            "fix the scale with --loss-scale",
        ),
    )

    @property
    def rule(self) -> str:
        """The name of the update rule."""
        return rule_name(self.optimizer)

    @property
    def rule_spec(self) -> RuleSpec:
        """The update rule."""
        return RULES[self.rule]

    @property
    def main_grad_bytes(self) -> int:
        """Bytes of an element of the main gradients."""
        return 2 if self.main_grads_dtype == "bf16" else 4

    @property
    def has_bf16_state(self) -> bool:
        """Whether any of the state, or the main gradient, is stored in bf16."""
        return "bf16" in (self.main_grads_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_params_dtype)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning-rate schedule. Lengths are in iterations with --train-iters and in samples with --train-samples."""

    lr: float | None = flag(None, "peak learning rate", within=NOT_NEGATIVE)
    min_lr: float = flag(0.0, "learning rate after the decay", within=NOT_NEGATIVE, needs=_LR_DECAY)
    decoupled_lr: float | None = flag(
        None,
        "peak learning rate of the word embeddings and the output layer; default that of all others, --lr",
        within=NOT_NEGATIVE,
        needs=_WHOLE_MODEL,
    )
    decoupled_min_lr: float | None = flag(
        None,
        "with --decoupled-lr, its value after the decay; default --min-lr",
        within=NOT_NEGATIVE,
        needs=(
            _LR_DECAY,
            Need(
                lambda run: run.schedule.decoupled_lr is not None, "--decoupled-lr is not given", "add --decoupled-lr"
            ),
            _WHOLE_MODEL,
        ),
    )
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "length of the decay, iterations; default the whole run", within=COUNT, needs=_LR_DECAY_OR_WARMUP_FRACTION
    )
    lr_decay_samples: int | None = flag(
        None, "length of the decay, samples; default the whole run", within=COUNT, needs=_LR_DECAY_OR_WARMUP_FRACTION
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase of WSD (warm-up, stable, decay)",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=_WSD,
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        "length of WSD's decay phase, iterations; 0 stays at the peak to the end of the decay length",
        within=COUNT_OR_NONE,
        needs=_WSD,
    )
    lr_wsd_decay_samples: int | None = flag(
        None,
        "length of WSD's decay phase, samples; 0 stays at the peak to the end of the decay length",
        within=COUNT_OR_NONE,
        needs=_WSD,
    )
    lr_warmup_iters: int = flag(0, "linear warm-up, iterations", within=COUNT_OR_NONE)
    lr_warmup_samples: int = flag(0, "linear warm-up, samples", within=COUNT_OR_NONE)
    lr_warmup_fraction: float | None = flag(None, "linear warm-up, fraction of the decay length", within=BELOW_ONE)
    lr_warmup_init: float = flag(
        0.0,
        "learning rate before the first step of the warm-up",
        within=NOT_NEGATIVE,
        needs=Need(
            lambda run: (
                run.schedule.lr_warmup_iters or run.schedule.lr_warmup_samples or run.schedule.lr_warmup_fraction
            ),
            "there is no warm-up",
            "add --lr-warmup-iters, -samples or -fraction",
        ),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "take the schedule from the flags even if the checkpoint has another one",
        aliases=("--override-opt_param-scheduler",),
        needs=_LOADED_SCHEDULE,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "take the schedule from the checkpoint even if the flags give another one",
        aliases=("--use-checkpoint-opt_param-scheduler",),
        needs=_LOADED_SCHEDULE,
    )

    @property
    def decoupled_minimum(self) -> float:
        """Learning rate of the word embeddings and the output layer after the decay, with --decoupled-lr."""
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
