"""The weights with which a run begins, before a checkpoint is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.groups import Groups
from megatron.core.models.hf.adapter import AdapterSource
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.resized import ResizedVocabulary
from megatron.core.models.source import Source, fill
from megatron.core.parameter import Parameter, initialize
from megatron.spec.lora import is_adapter
from megatron.training.export import CheckpointSource
from megatron.training.saved_model import begins_anew, check_begins, has_rows_of, model_config_of
from megatron.training.saved_run import read_run_state
from megatron.training.together import together

log = get_logger(__name__)


def initial_weights(
    parameters: dict[str, Parameter],
    groups: Groups,
    model: ModelConfig,
    checkpoint: CheckpointConfig,
    seed: int,
    path: Path | None,
    converted: Source | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Initialises weights from the seed, or from --load-hf and --load-adapter; the checkpoint in `path` overwrites them
    later.

    converted: the weights of the checkpoint, where they are read here: see `weights_to_convert`. buffers: those of the
    model, of which --load-hf has the biases of the choice of experts. Collective over the world if files are read.
    Raises ConfigError for adapters of an untrained model, and CheckpointError.
    """
    adapters = {name: parameter for name, parameter in parameters.items() if is_adapter(name)}
    if path is not None:
        if converted is not None:
            read = {name: parameter for name, parameter in parameters.items() if name in converted.shapes}
            load_weights(str(path), converted, read, groups)
        if checkpoint.load_adapter:
            return _load_adapter(checkpoint.load_adapter, model, adapters, groups)
        new = {name: p for name, p in parameters.items() if converted is None or name not in converted.shapes}
        return initialize({name: p for name, p in new.items() if p.requires_grad}, seed)
    if checkpoint.load_hf:
        base = {name: parameter for name, parameter in parameters.items() if name not in adapters}
        _load_hf(checkpoint.load_hf, checkpoint.load_adapter, model, base, groups, buffers or {})
        if checkpoint.load_adapter:
            return _load_adapter(checkpoint.load_adapter, model, adapters, groups)
        return initialize(adapters, seed)
    if model.lora_rank:
        raise ConfigError(
            f"--lora-rank {model.lora_rank} adapts a model that is trained already, and "
            f"{f'--load {checkpoint.load} holds none' if checkpoint.load else 'none is given'}; give "
            "--load-hf, --pretrained-checkpoint or --load a trained model"
        )
    initialize(parameters, seed)


def weights_to_convert(path: Path, checkpoint: CheckpointConfig, model: ModelConfig) -> Source | None:
    """Returns the weights of the checkpoint in `path` if a new run of `model` begins with them in another precision, or
    with more tokens; None if load_checkpoint reads them as they are. No communication. Raises CheckpointError.
    """
    state = read_run_state(path)
    saved = model_config_of(state)
    resizes = not has_rows_of(saved, model)
    if not begins_anew(state, checkpoint) or not (resizes or saved.dtype_name != model.dtype_name):
        return None
    check_begins(path, saved, model, checkpoint)
    return weights_of(path, model)


def weights_of(path: Path, model: ModelConfig) -> Source:
    """Returns the weights of the checkpoint in `path`, with the rows that the vocabulary of `model` has. No
    communication. Raises CheckpointError."""
    source = MCoreSource(path, None, None) if is_foreign(path) else CheckpointSource(path)
    return _resized(path, source, model)


def _load_hf(
    folder: str,
    adapter: str | None,
    model: ModelConfig,
    parameters: dict[str, Parameter],
    groups: Groups,
    buffers: Mapping[str, Tensor],
) -> None:
    source = together(groups.world, lambda: HFSource(Path(folder), adapter))
    if model.mtp_num_layers:
        together(groups.world, lambda: source.check_copies() if groups.world.rank == 0 else None)
    elif source.model.mtp_num_layers:
        log.info("%s: layers that predict further tokens are not trained; --mtp-num-layers trains them", folder)
    if source.weights.scales:
        log.info("%s: %d tensors are in FP8 and are multiplied by their scales", folder, len(source.weights.scales))
    resized = together(groups.world, lambda: _resized(Path(folder), source, model))
    load_weights(folder, resized, parameters, groups, buffers)


def _resized(path: Path, source: Source, model: ModelConfig) -> Source:
    """Returns the weights with the rows that the vocabulary of `model` has."""
    if has_rows_of(source.model, model):
        return source
    new = (model.vocab_size or 0) - (source.model.vocab_size or 0)
    if new and model.lora_rank:
        raise ConfigError(
            f"--vocab-size {model.vocab_size} adds {new} tokens, whose embeddings would never be trained: --lora-rank "
            f"{model.lora_rank} trains adapters alone; leave out one of the two"
        )
    log.info("%d new tokens begin with the mean of the %d embeddings in %s", new, source.model.vocab_size, path)
    return ResizedVocabulary(source, model)


def _load_adapter(folder: str, model: ModelConfig, adapters: dict[str, Parameter], groups: Groups) -> None:
    base = dataclasses.replace(model, lora_rank=None)
    load_weights(folder, together(groups.world, lambda: AdapterSource(Path(folder), base)), adapters, groups)


def load_weights(
    folder: str,
    source: Source,
    parameters: dict[str, Parameter],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Loads a rank's parameters from the weights of a folder. Collective over the world. Raises CheckpointError."""
    with groups.heartbeat.phase("load-checkpoint"):
        together(groups.world, lambda: fill(parameters, source, buffers))
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}
    log.info("loaded %s, stored as %s, as %s", folder, str(source.dtype).removeprefix("torch."), ", ".join(dtypes))
