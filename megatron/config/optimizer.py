"""Optimizer, learning-rate schedule, weight decay and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated."""

    optimizer: str = flag(
        "adam",
        "update rule; adam is AdamW (decoupled weight decay); hybridadam is adam with --optimizer-cpu-offload and "
        "--optimizer-offload-policy auto",
        choices=("adam", "sgd", "hybridadam"),
    )
    adam_beta1: float = flag(0.9, "decay of the mean of gradients")
    adam_beta2: float = flag(0.999, "decay of the mean of squared gradients")
    adam_eps: float = flag(1e-8, "term added to the denominator")
    sgd_momentum: float = flag(0.9, "momentum of sgd")
    clip_grad: float = flag(1.0, "limit on the global gradient norm; 0 turns clipping off")
    use_precision_aware_optimizer: bool = flag(
        False, "allow optimizer state in bf16: --exp-avg-dtype, --exp-avg-sq-dtype, --main-params-dtype"
    )
    exp_avg_dtype: str = flag("fp32", "dtype that adam's mean of gradients is stored in", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = flag(
        "fp32",
        "dtype that adam's mean of squares is stored in; bf16 is rounded at random",
        choices=("fp32", "bf16"),
    )
    main_params_dtype: str = flag(
        "fp32",
        "bf16 stores only what the bf16 weights lack of the fp32 masters, the lower 16 bits; the update is the same",
        choices=("fp32", "bf16"),
    )
    weight_decay: float = flag(0.01, "weight decay, on matrices only: not on biases and norm weights")
    start_weight_decay: float | None = flag(None, "weight decay at the first step of a ramp")
    end_weight_decay: float | None = flag(None, "weight decay at the end of a ramp")
    weight_decay_incr_style: str = flag(
        "constant", "shape of the weight-decay ramp", choices=("constant", "linear", "cosine")
    )
    loss_scale: float | None = flag(None, "fixed fp16 loss scale; default dynamic")
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "the dynamic loss scale never falls below this")
    loss_scale_window: int = flag(1000, "good steps after which the dynamic loss scale doubles")
    hysteresis: int = flag(2, "overflows before the dynamic loss scale halves; a full good window resets the count")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "apply a step whose gradients hold NaN or infinity; by default it is skipped, and said"
    )

    @property
    def rule(self) -> str:
        """The update rule: adam or sgd."""
        return "sgd" if self.optimizer == "sgd" else "adam"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves. Lengths are in iterations with --train-iters and in samples with --train-samples."""

    lr: float | None = flag(None, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate after the decay")
    decoupled_lr: float | None = flag(
        None, "peak learning rate of the word embeddings and the output layer; default that of all others, --lr"
    )
    decoupled_min_lr: float | None = flag(None, "with --decoupled-lr, its value after the decay; default --min-lr")
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "length of the decay, iterations; default the whole run")
    lr_decay_samples: int | None = flag(None, "length of the decay, samples; default the whole run")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase of WSD (warm-up, stable, decay)",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "length of WSD's decay phase, iterations; 0 stays at the peak to the end of the decay length"
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "length of WSD's decay phase, samples; 0 stays at the peak to the end of the decay length"
    )
    lr_warmup_iters: int = flag(0, "linear warm-up, iterations")
    lr_warmup_samples: int = flag(0, "linear warm-up, samples")
    lr_warmup_fraction: float | None = flag(None, "linear warm-up, fraction of the decay length")
    lr_warmup_init: float = flag(0.0, "learning rate before the first step of the warm-up")
    override_opt_param_scheduler: bool = flag(
        False,
        "take the schedule from the flags although the checkpoint was made with another one",
        aliases=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "take the schedule from the checkpoint although the flags give another one",
        aliases=("--use-checkpoint-opt_param-scheduler",),
    )

    @property
    def decoupled_minimum(self) -> float:
        """Learning rate of the word embeddings and the output layer after the decay, with --decoupled-lr."""
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
