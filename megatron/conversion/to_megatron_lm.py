"""Converts the training state of a run to the form from which Megatron-LM continues it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.update_rules import ADAM, rule_name
from megatron.core.models.mcore.training_state import Adam, TrainingState
from megatron.training.export import CheckpointSource

# Arguments of the run that have the same names here and in Megatron-LM; both read them to continue.
_SETTINGS = {
    "train": ("global_batch_size", "micro_batch_size", "train_iters", "train_samples", "seed"),
    "schedule": ("lr", "min_lr", "lr_decay_style", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    "optimizer": ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
}


def training_state_of(source: CheckpointSource, dtype: torch.dtype) -> TrainingState:
    """Returns the training state of a checkpoint that a run saved with its optimizer; of another one, an empty state.

    Raises ConfigError if Megatron-LM could not continue: for a precision other than the run's, for SGD, and for a
    separate learning rate of the embeddings.
    """
    state = source.state
    if state["train"] is None or state["optimizer"] is None or state["schedule"] is None:
        return TrainingState()
    config, without = state["config"], "give --no-load-optim to take the weights alone"
    if dtype != source.dtype:
        raise ConfigError(
            f"{source.path} holds the optimizer of a model in {_name(source.dtype)}, {_name(dtype)} is asked for; "
            f"{without}"
        )
    if (rule := rule_name(config["optimizer"]["optimizer"])) != ADAM:
        raise ConfigError(f"{source.path} holds the state of optimizer {rule}, and only Adam's is written; {without}")
    if (rate := state["schedule"].get("decoupled_max_lr")) is not None:
        raise ConfigError(
            f"{source.path} is of a run with --decoupled-lr {rate}, and Megatron-LM's groups of parameters for it are "
            f"not written; {without}"
        )
    train, batch = state["train"], _batch_size(state)
    arguments = {name: config[part].get(name) for part, names in _SETTINGS.items() for name in names}
    arguments |= {
        "global_batch_size": batch,
        "consumed_train_samples": train["consumed_samples"],
        "consumed_valid_samples": train["consumed_valid_samples"],
        "optimizer": ADAM,
    }
    if state["schedule"]["unit"] == "samples":
        arguments["lr_wsd_decay_samples"] = config["schedule"].get("lr_wsd_decay_samples")
    return TrainingState(
        iteration=train["iteration"],
        arguments=arguments,
        scheduler=_scheduler(state, batch),
        floating_point_operations=train["floating_point_operations"],
        adam=_adam(source),
    )


def _adam(source: CheckpointSource) -> Adam:
    saved, flags = source.state["optimizer"], source.state["config"]["optimizer"]
    moves = source.dtype == torch.float16 and flags["loss_scale"] is None

    def read(name: str, key: str, box: Box) -> Tensor:
        if key == "master" and source.dtype == torch.float32:
            return source.read(name, box, torch.float32)
        return source.read_state(name, key, box)

    return Adam(
        updates=saved["steps"],
        betas=(flags["adam_beta1"], flags["adam_beta2"]),
        eps=flags["adam_eps"],
        loss_scale=_loss_scale(saved["loss_scale"]) if moves else None,
        read=read,
    )


def _loss_scale(saved: dict[str, Any]) -> dict[str, Any]:
    return {
        "scale": torch.tensor([saved["value"]]),
        "growth_tracker": int(saved["good_steps"]),
        "hysteresis_tracker": int(saved["hysteresis"]),
    }


def _scheduler(state: dict[str, Any], batch: int) -> dict[str, Any]:
    """Returns the scheduler's state, with lengths in samples, as Megatron-LM always stores them.

    It compares all of them with its flags, including those without effect on a constant rate, which are not among our
    settings.
    """
    settings, flags, train = state["schedule"], state["config"]["schedule"], state["config"]["train"]
    in_samples = settings["unit"] == "samples"
    unit = 1 if in_samples else batch
    length = train["train_samples"] if in_samples else train["train_iters"]
    decay = settings["decay_length"] or flags["lr_decay_samples" if in_samples else "lr_decay_iters"] or length
    is_constant = settings["decay_style"] == "constant"
    return {
        "max_lr": settings["max_lr"],
        "min_lr": flags["min_lr"] if is_constant else settings["min_lr"],
        "lr_warmup_steps": settings["warmup_length"] * unit,
        "lr_decay_steps": decay * unit,
        "lr_decay_style": settings["decay_style"],
        "num_steps": state["train"]["schedule_position"] * unit,
        "start_wd": settings["start_weight_decay"],
        "end_wd": settings["end_weight_decay"],
        "wd_incr_style": settings["weight_decay_style"],
        "wd_incr_steps": (settings["weight_decay_length"] or length) * unit,
    }


def _batch_size(state: dict[str, Any]) -> int:
    train = state["config"]["train"]
    return int(train["global_batch_size"] or train["micro_batch_size"] * state["layout"]["dp"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
