"""The model of a checkpoint, and whether a run can go on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import OVERRIDABLE_FIELDS, ModelConfig
from megatron.spec.decoder import decoder_spec
from megatron.training.saved_run import read_run_state, stored_part

log = get_logger(__name__)

_ROWS = {"vocab_size", "make_vocab_size_divisible_by", "fixed_padded_vocab_size"}  # fields about rows of the vocabulary


def saved_model_config(path: Path) -> ModelConfig:
    """Returns the model configuration with which a checkpoint was saved."""
    return model_config_of(read_run_state(path))


def model_config_of(state: dict[str, Any]) -> ModelConfig:
    """Returns the model configuration in a checkpoint's state. Raises CheckpointError for one that no run has saved."""
    # Older than the flag: its GELU was exact unless --openai-gelu said not.
    return stored_part(ModelConfig, state, "model", bias_gelu_fusion=False)


def begins_anew(state: dict[str, Any], checkpoint: CheckpointConfig) -> bool:
    """Returns whether a run takes only the weights of a checkpoint with this state."""
    return checkpoint.finetune or state["train"] is None  # a converted model was not trained here


def has_rows_of(saved: ModelConfig, model: ModelConfig) -> bool:
    """Returns whether a saved model has the tokens and the padding of a run's.
    Megatron-LM may not have saved the former."""
    return saved.vocab_size in (None, model.vocab_size) and saved.padded_vocab_size == model.padded_vocab_size


def check_begins(path: Path, saved: ModelConfig, model: ModelConfig, checkpoint: CheckpointConfig) -> None:
    """Raises CheckpointError unless a new run of `model` can begin with the weights of the saved model: with the same
    function, or adapters on it, but with any precision and at least its tokens.
    """
    if saved.vocab_size and model.vocab_size and model.vocab_size < saved.vocab_size:
        raise CheckpointError(
            f"{path} has {saved.vocab_size} tokens, and --vocab-size {model.vocab_size} would drop some of them; give "
            f"--vocab-size {saved.vocab_size} or more, or leave it out"
        )
    base = model if saved.lora_rank else dataclasses.replace(model, lora_rank=None)
    resized = dataclasses.replace(saved, **{name: getattr(model, name) for name in _ROWS})
    if saved.mtp_num_layers > model.mtp_num_layers:
        log.info(
            "%s: of %d layers that predict further tokens %d are used", path, saved.mtp_num_layers, model.mtp_num_layers
        )
        resized = dataclasses.replace(resized, mtp_num_layers=model.mtp_num_layers)
    check_same_model(path, resized, base, checkpoint.override_model_fields)


def check_same_model(path: Path, saved: ModelConfig, model: ModelConfig, override: Collection[str]) -> None:
    """Raises CheckpointError naming every difference between the checkpoint's model and this run's.

    override: fields that may differ as long as no tensor does; both values of each are logged.
    """
    if saved.lora_rank and not model.lora_rank:
        raise CheckpointError(
            f"{path} holds LoRA adapters (--lora-rank {saved.lora_rank}); give its LoRA flags to go on with them, "
            "or merge them into the model with tools/checkpoint/convert.py --loader megatron --saver megatron"
        )
    saved_decoder, decoder = decoder_spec(saved), decoder_spec(model)
    if saved_decoder == decoder:
        return
    overridden = dataclasses.replace(saved, **{name: getattr(model, name) for name in override})
    has_same_tensors = saved_decoder.parameters() == decoder.parameters()
    if not has_same_tensors or decoder_spec(overridden) != decoder:
        differences = _differences(saved, model)
        fix = "give the same model flags or --use-checkpoint-args"
        if has_same_tensors and differences.keys() <= set(OVERRIDABLE_FIELDS):
            fix += f", or to go on with this run's --override-model-fields {' '.join(differences)}"
        elif differences.keys() <= _ROWS and (saved.vocab_size or 0) <= (model.vocab_size or 0):
            fix += ", or --finetune to start a new run with its weights"
        described = "; ".join(f"{name} is {old} there and {new} here" for name, (old, new) in differences.items())
        raise CheckpointError(f"{path} is a checkpoint of another model: {described}; {fix}")
    for name in override:
        if getattr(saved, name) != getattr(model, name):
            log.warning("%s: %s in the checkpoint, %s in this run", name, getattr(saved, name), getattr(model, name))


def _differences(saved: ModelConfig, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns field -> (the value in effect in the checkpoint, that in this run),
    for fields that make another model."""
    differences = {}
    for field in dataclasses.fields(ModelConfig):
        values = saved.in_effect(field.name), model.in_effect(field.name)
        if values[0] != values[1] and (_matters(field.name, saved, model) or _matters(field.name, model, saved)):
            differences[field.name] = values
    return differences


def _matters(name: str, model: ModelConfig, other: ModelConfig) -> bool:
    """Whether the other model's value of a field makes another decoder of this model."""
    try:
        return decoder_spec(dataclasses.replace(model, **{name: getattr(other, name)})) != decoder_spec(model)
    except ConfigError:  # it does not go with the other fields
        return True


def check_same_precision(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    """Raises CheckpointError if the weights have another dtype than this run's."""
    fixes = {"bfloat16": "give --bf16", "float16": "give --fp16", "float32": "leave out --bf16 and --fp16"}
    if saved.dtype_name != model.dtype_name:
        raise CheckpointError(
            f"{path} holds {saved.dtype_name} weights and this run asks for {model.dtype_name}; "
            f"{fixes[saved.dtype_name]}, or --finetune to start a new run with its weights"
        )
