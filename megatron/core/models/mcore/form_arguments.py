"""Megatron-LM's arguments of forms of a layer: the softmax of attention, and the gate of an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.layer_forms import VANILLA
from megatron.config.model import ModelConfig

SWITCHES = ("quick_geglu",)
NUMBERS = ("glu_linear_offset", "activation_func_clamp_value")
SOFTMAX_TYPE = "softmax_type"
_PLAIN = {"quick_geglu": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None, SOFTMAX_TYPE: VANILLA}


def forms_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the model. settings: the arguments that are not None."""
    return {name: float(settings[name]) if name in NUMBERS else settings[name] for name in _PLAIN if name in settings}


def form_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns the arguments that differ from their defaults: the first versions lack them."""
    return {name: getattr(model, name) for name, plain in _PLAIN.items() if getattr(model, name) != plain}


def form_flags(model: ModelConfig) -> list[str]:
    """Returns flags needed in addition to --use-checkpoint-args, which does not take these from the file."""
    flags = []
    for name, value in form_arguments(model).items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    return flags
