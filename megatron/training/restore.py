"""A model from a checkpoint alone, for tools that run it and do not train it: its shape and tokenizer are those saved."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.store import load, read_state
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.groups import Groups
from megatron.core.log import get_logger
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.checkpoint import model_config_of, model_tensors

log = get_logger(__name__)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says about its model, read before anything is built."""

    path: Path
    model: ModelConfig
    tokenizer: TokenizerConfig


def read_saved(directory: str, step: int | None) -> Saved:
    """The newest checkpoint in `directory`, or that of iteration `step`. Local. Raises CheckpointError."""
    path = find(Path(directory), step)
    if path is None:
        raise CheckpointError(f"--load {directory} holds no checkpoint; give the folder that a run saved in")
    return Saved(path, *saved_parts(read_state(path)))


def saved_parts(state: dict[str, Any]) -> tuple[ModelConfig, TokenizerConfig]:
    """The model and the tokenizer in a checkpoint's state."""
    known = {field.name for field in dataclasses.fields(TokenizerConfig)}
    saved: dict[str, Any] = state["config"]["tokenizer"]
    return model_config_of(state), TokenizerConfig(**{k: value for k, value in saved.items() if k in known})


def check_tp(saved: Saved, tp: int) -> None:
    """Raise ConfigError unless `tp` processes can share each layer of the saved model."""
    model = saved.model
    assert model.num_attention_heads
    sizes = (model.num_attention_heads, model.num_kv_heads, model.ffn_dim, model.padded_vocab_size)
    common = math.gcd(*sizes)
    if common % tp:
        heads, groups, width, vocabulary = sizes
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} does not cut the model of {saved.path}: {heads} heads, {groups} "
            f"key/value heads, MLP width {width}, padded vocabulary {vocabulary}; use a divisor of {common}"
        )


def restore_tokenizer(saved: Saved, **changes: Any) -> Tokenizer:
    """The saved tokenizer with fields of its configuration changed. Local. Raises ConfigError and DataError.

    A checkpoint cannot ask for a tokenizer's own code to be run: trust_remote_code is False unless it is in `changes`.
    """
    config = dataclasses.replace(saved.tokenizer, **{"trust_remote_code": False, **changes})
    tokenizer = build_tokenizer(config, saved.model.vocab_size)
    assert saved.model.vocab_size
    if tokenizer.vocab_size > saved.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model of {saved.path} knows "
            f"{saved.model.vocab_size}; give the tokenizer it was trained with"
        )
    return tokenizer


def restore_model(saved: Saved, groups: Groups, device: torch.device) -> tuple[GPTModel, Build]:
    """The saved weights under the layout of `groups`, for evaluation: no dropout, no gradients, no sequence parallelism.

    Precision is that of the checkpoint; attention takes the fastest kernel of this machine. Collective over the world:
    small objects only. Raises CheckpointError.
    """
    config = dataclasses.replace(saved.model, attention_backend="auto", gradient_accumulation_fusion=False)
    kernels, rng = choose_kernels(config, device), RngTracker(0, groups, device)
    build = Build(config, groups, False, kernels, rng, device)
    model = GPTModel(build).eval().requires_grad_(False)
    with groups.heartbeat.phase("load-checkpoint"):
        load(saved.path, model_tensors(local_parameters(model), groups), group=groups.world)
    log.info("loaded %s: %s on %s, tp %d", saved.path, config.dtype_name, device, groups.tp.size)
    return model, build
