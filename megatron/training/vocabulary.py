"""The vocabulary and the positions of a run's model: from its flags, the checkpoint that it loads, or the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.model import ModelConfig
from megatron.config.rules.check import check_vocabulary
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.training.saved_model import saved_model_config

log = get_logger(__name__)


def with_vocabulary(
    model: ModelConfig,
    flags: Collection[str],
    checkpoint: Path | None,
    *,
    tokenizer_vocab_size: int,
    seq_length: int | None,
    tp: int,
    continues: bool = False,
) -> ModelConfig:
    """Returns the model with its vocabulary and its range of positions, checked against the tokenizer.

    A vocabulary that is not given is that of the loaded checkpoint, or else the tokenizer's, and padding that is not
    given is the checkpoint's. That of Megatron-LM's depends on its layout: only --padded-vocab-size overrides it.
    flags: names of the fields that the user gave. continues: see check_vocabulary. Raises ConfigError.
    """
    saved = None if checkpoint is None else _saved_model(checkpoint)
    size, origin = model.vocab_size, "of the flags"
    if size is None and saved is not None:
        size, origin = saved.vocab_size, "of the checkpoint"
    if size is None:
        size, origin = tokenizer_vocab_size, "of the tokenizer"
    positions = model.max_position_embeddings or seq_length
    model = dataclasses.replace(model, vocab_size=size, max_position_embeddings=positions)
    if saved is not None and "mask_padded_vocabulary" not in flags:
        model = dataclasses.replace(model, mask_padded_vocabulary=saved.mask_padded_vocabulary)
    padding = {"fixed_padded_vocab_size"}
    if checkpoint is not None and not is_foreign(checkpoint):
        padding.add("make_vocab_size_divisible_by")  # which Megatron-LM multiplies by its tensor-parallel size
    grows = saved is not None and saved.vocab_size is not None and size > saved.vocab_size
    if saved is not None and not grows and padding.isdisjoint(flags):
        model = dataclasses.replace(model, fixed_padded_vocab_size=saved.fixed_padded_vocab_size)
    check_vocabulary(model, tp, tokenizer_vocab_size, continues=continues)
    log.info(
        "vocabulary: %d tokens (%s), padded to %d%s; the tokenizer has %d",
        *(size, origin, model.padded_vocab_size),
        "" if model.mask_padded_vocabulary else " which all take part in the softmax",
        tokenizer_vocab_size,
    )
    return model


def _saved_model(checkpoint: Path) -> ModelConfig | None:
    try:
        return saved_model_config(checkpoint)
    except CheckpointError:
        return None  # loading it will say what is wrong, and which one is whole
