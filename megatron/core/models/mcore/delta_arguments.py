"""Megatron-LM's arguments of gated delta nets and of gates on attention: read as fields of the model, and written.

Its delta nets have the norm and the activation of the model in them, which are those of ours with RMSNorm and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.delta_net import KDA
from megatron.config.model import ModelConfig
from megatron.core.models.mcore.known_arguments import listed

VARIANT, FREQUENCY, GATE = "experimental_attention_variant", "linear_attention_freq", "attention_output_gate"
WHOLE = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_VARIANTS = ("gdn", "gated_delta_net")
_RMS_NORM = "RMSNorm"


def delta_nets_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of the model. settings: the arguments that are not None. Raises CheckpointError naming the
    argument and the reason."""
    gate = {GATE: settings.get(GATE, False)}
    frequency, variant = settings.get(FREQUENCY), settings.get(VARIANT)
    if variant is None and frequency is None:
        return gate
    if variant not in _VARIANTS or isinstance(frequency, bool) or not isinstance(frequency, int | list | tuple):
        raise CheckpointError(
            f"{where}: {listed({VARIANT: variant, FREQUENCY: frequency})}, which is not supported; gated delta nets "
            "(gdn) with a pattern of layers are"
        )
    wanted = {"normalization": _RMS_NORM, "swiglu": True}
    if wrong := {name: settings.get(name) for name, value in wanted.items() if settings.get(name) != value}:
        raise CheckpointError(f"{where}: {listed(wrong)} beside delta nets, which is not supported")
    sizes = {name: settings[name] for name in WHOLE if name in settings}
    pattern = str(frequency if isinstance(frequency, int) else list(frequency))
    return {**gate, **sizes, VARIANT: variant, FREQUENCY: pattern}


def check_delta_nets(model: ModelConfig, where: str) -> None:
    """Raises CheckpointError unless the arguments fit each other."""
    if not model.has_delta_net:
        return
    try:
        chosen = model.delta_layers
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if values % keys:
        raise CheckpointError(f"{where}: {values} value heads of a delta net cannot share {keys} key heads")
    if all(chosen) or not any(chosen):
        raise CheckpointError(f"{where}: argument {FREQUENCY} leaves only layers of one kind, which is not supported")


def check_implementation(model: ModelConfig, *, local: bool) -> None:
    """Raises ConfigError for layers of Megatron-LM that it has no delta nets with. local: its own layers."""
    if local and model.has_delta_net:
        raise ConfigError(
            "--saver-transformer-impl local: Megatron-LM has gated delta nets with Transformer Engine's layers only; "
            "leave it out"
        )


def delta_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns the arguments that differ from their defaults: the first versions lack them."""
    fields: dict[str, Any] = {GATE: True} if model.attention_output_gate else {}
    if model.has_delta_net:
        fields |= {name: getattr(model, name) for name in (VARIANT, *WHOLE)}
        fields[FREQUENCY] = [int(has_delta_net) for has_delta_net in model.delta_layers]
    return fields


def delta_flags(model: ModelConfig) -> list[str]:
    """Returns flags needed in addition to --use-checkpoint-args, which does not take these from the file."""
    flags = []
    for name, value in delta_arguments(model).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value).replace(" ", "")]
    return flags


def without_delta_argument(model: ModelConfig) -> list[str]:
    """Returns the flags of models with delta nets, with their reasons, for which Megatron-LM has no argument."""
    if not model.has_delta_net:
        return []
    flags = []
    if model.delta_net_form == KDA:
        flags.append(f"--experimental-attention-variant {KDA}")
    if model.multi_latent_attention:
        flags.append("--multi-latent-attention (with delta nets)")
    if model.normalization != _RMS_NORM:
        flags.append(f"--normalization {model.normalization} (Megatron-LM's delta nets have it, too)")
    if not model.swiglu:
        flags.append(
            f"--experimental-attention-variant {model.experimental_attention_variant} without --swiglu (Megatron-LM's "
            "delta nets have the activation of the MLP)"
        )
    return flags
