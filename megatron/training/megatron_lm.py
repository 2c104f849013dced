"""Converts a checkpoint of a Megatron-LM run to the state of a run here, so that it continues here.

Iteration, consumed samples, the position and the settings of its schedule, the updates of its optimizer and its loss
scale are kept; its random states are not, because they belong to other generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.config.update_rules import ADAM, RULES
from megatron.core.dist_checkpointing.folders import RELEASE
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.optimizer.lr_schedule import ScheduleSettings
from megatron.training.state import TrainState

_FORMER = {"lr_warmup_steps": "warmup_steps", "lr_decay_steps": "decay_steps", "lr_decay_style": "decay_style"}
# The settings that determine its samples (data_order.py, changed_settings.py),
# with their defaults in versions without them.
_DATA = {
    "sft": False,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "mock_data": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "split": None,
    "seq_length": None,
    "dataloader_type": "single",
    "data_sharding": True,
}
_TRAIN = {
    "global_batch_size": None,
    "micro_batch_size": 1,
    "train_samples": None,
    "train_iters": None,
    "seed": 1234,
    "calculate_per_token_loss": False,
    "z_loss_coeff": None,
}


def state_of(source: MCoreSource, vocab_size: int | None) -> dict[str, Any]:
    """Returns the state of a run in the format of `checkpoint.py`.

    `vocab_size` is the size without padding, if its arguments do not contain it. Raises CheckpointError.
    """
    arguments = source.arguments
    model = dataclasses.replace(
        source.model,
        bf16=source.dtype == torch.bfloat16,
        fp16=source.dtype == torch.float16,
        vocab_size=vocab_size if arguments.get("vocab_size") is None else source.model.vocab_size,
    )
    is_run = source.path.name != RELEASE and "iteration" in source.common
    return {
        "config": {
            "model": dataclasses.asdict(model),
            "optimizer": {"optimizer": arguments.get("optimizer", ADAM)},
            "data": {
                "data_order": "megatron",
                **{name: arguments.get(name, default) for name, default in _DATA.items()},
            },
            "train": {name: arguments.get(name, default) for name, default in _TRAIN.items()},
        },
        "train": dataclasses.asdict(_progress(source)) if is_run else None,
        "schedule": dataclasses.asdict(_schedule(source)) if is_run and _scheduler(source) else None,
        "layout": {"dp": arguments.get("data_parallel_size", 1)},
        "rng": None,
        "optimizer": _optimizer(source) if is_run and source.has_optimizer else None,
    }


def _progress(source: MCoreSource) -> TrainState:
    arguments, common = source.arguments, source.common
    samples = _number(arguments, "consumed_train_samples", source)
    position = _number(_scheduler(source), "num_steps", source, default=samples)
    return TrainState(
        iteration=int(_number(common, "iteration", source)),
        consumed_samples=int(samples),
        schedule_position=round(position / _unit(source)),
        consumed_valid_samples=int(_number(arguments, "consumed_valid_samples", source, default=0)),
        floating_point_operations=float(_number(common, "num_floating_point_operations_so_far", source, default=0)),
    )


def _schedule(source: MCoreSource) -> ScheduleSettings:
    """Megatron-LM counts samples in every schedule; one of iterations has a batch size as its unit."""
    saved, arguments, unit = _scheduler(source), source.arguments, _unit(source)
    style, wd_style = str(_field(saved, "lr_decay_style", source)), str(_field(saved, "wd_incr_style", source))
    in_samples = arguments.get("train_samples") is not None
    warmup = _number(saved, "lr_warmup_steps", source) / unit
    wsd = arguments.get("lr_wsd_decay_samples" if in_samples else "lr_wsd_decay_iters") if style == "WSD" else None
    is_constant = style == "constant"
    min_lr = 0.0 if is_constant else _number(saved, "min_lr", source)
    decoupled_lr = None if arguments.get("decoupled_lr") is None else _number(arguments, "decoupled_lr", source)
    has_minimum = decoupled_lr is not None and not is_constant
    return ScheduleSettings(
        unit="samples" if in_samples else "iterations",
        max_lr=_number(saved, "max_lr", source),
        min_lr=min_lr,
        warmup_init_lr=_number(arguments, "lr_warmup_init", source, default=0) if warmup else 0.0,
        warmup_length=warmup,
        decay_style=style,
        decay_length=0 if is_constant else round(_number(saved, "lr_decay_steps", source) / unit),
        wsd_decay_style=str(arguments.get("lr_wsd_decay_style")) if wsd else "",
        wsd_decay_length=int(wsd or 0),
        start_weight_decay=_number(saved, "start_wd", source),
        end_weight_decay=_number(saved, "end_wd", source),
        weight_decay_style=wd_style,
        weight_decay_length=0 if wd_style == "constant" else round(_number(saved, "wd_incr_steps", source) / unit),
        decoupled_max_lr=decoupled_lr,
        decoupled_min_lr=_number(arguments, "decoupled_min_lr", source, default=min_lr) if has_minimum else 0.0,
    )


def _optimizer(source: MCoreSource) -> dict[str, Any]:
    part = source.optimizer_part("optimizer") or {}
    groups, state = part.get("param_groups", ()), part.get("state", {})
    counted = [group["step"] for group in groups if "step" in group]
    counted += [state["common_step"]] if "common_step" in state else []
    counted += [held["step"] for held in state.values() if isinstance(held, dict) and "step" in held]
    steps = {int(step) for step in counted}
    if len(steps) > 1:
        raise CheckpointError(
            f"{source.path}: parameters of its optimizer had {sorted(steps)} updates; give --no-load-optim"
        )
    rule = RULES[source.arguments.get("optimizer", ADAM)]
    if not steps and rule.counts_updates:
        raise CheckpointError(f"{source.path} does not say how many updates its optimizer made; give --no-load-optim")
    scaler = source.optimizer_part("grad_scaler") or {}
    scale = None
    if "scale" in scaler and "growth_tracker" in scaler:
        scale = {
            "value": float(scaler["scale"]),
            "good_steps": int(scaler["growth_tracker"]),
            "hysteresis": int(scaler["hysteresis_tracker"]),
        }
    return {"steps": steps.pop() if steps else int(source.common["iteration"]), "loss_scale": scale}


def _scheduler(source: MCoreSource) -> Mapping[str, Any]:
    scheduler = source.common.get("opt_param_scheduler", {})
    return scheduler if isinstance(scheduler, dict) else {}


def _unit(source: MCoreSource) -> float:
    """Returns the number of samples in one unit of the schedule's position."""
    if source.arguments.get("train_samples") is not None:
        return 1
    return _number(source.arguments, "global_batch_size", source)


def _field(held: Mapping[str, Any], name: str, source: MCoreSource) -> Any:
    values = [held[key] for key in (name, _FORMER.get(name, name)) if key in held]
    if not values:
        raise CheckpointError(f"{source.path} does not say {name}; start from its weights with --finetune")
    return values[0]


def _number(held: Mapping[str, Any], name: str, source: MCoreSource, *, default: float | None = None) -> float:
    value = default if default is not None and held.get(name) is None else _field(held, name, source)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source.path}: {name} is {value!r}, which is no number")
    return value
