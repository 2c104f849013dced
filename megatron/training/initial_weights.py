"""The weights with which a run begins, before a checkpoint is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import ModelConfig
from megatron.core.groups import Groups
from megatron.core.models.hf.adapter import AdapterSource
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import Source, fill
from megatron.core.parameter import Parameter, initialize
from megatron.spec.lora import is_adapter
from megatron.training.together import together

log = get_logger(__name__)


def initial_weights(
    parameters: dict[str, Parameter],
    groups: Groups,
    model: ModelConfig,
    checkpoint: CheckpointConfig,
    seed: int,
    *,
    has_checkpoint: bool,
) -> None:
    """Initialises weights from the seed, or from --load-hf and --load-adapter; a checkpoint overwrites them later.

    Collective over the world if files are read. Raises ConfigError for adapters of an untrained model.
    """
    adapters = {name: parameter for name, parameter in parameters.items() if is_adapter(name)}
    if has_checkpoint:
        if checkpoint.load_adapter:
            return _load_adapter(checkpoint.load_adapter, model, adapters, groups)
        return initialize({n: p for n, p in parameters.items() if p.requires_grad}, seed)
    if checkpoint.load_hf:
        base = {name: parameter for name, parameter in parameters.items() if name not in adapters}
        _load_hf(checkpoint.load_hf, checkpoint.load_adapter, base, groups)
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


def _load_hf(folder: str, adapter: str | None, parameters: dict[str, Parameter], groups: Groups) -> None:
    source = together(groups.world, lambda: HFSource(Path(folder), adapter))
    if source.weights.scales:
        log.info("%s: %d tensors are in FP8 and are multiplied by their scales", folder, len(source.weights.scales))
    _fill(folder, source, parameters, groups)


def _load_adapter(folder: str, model: ModelConfig, adapters: dict[str, Parameter], groups: Groups) -> None:
    base = dataclasses.replace(model, lora_rank=None)
    _fill(folder, together(groups.world, lambda: AdapterSource(Path(folder), base)), adapters, groups)


def _fill(folder: str, source: Source, parameters: dict[str, Parameter], groups: Groups) -> None:
    with groups.heartbeat.phase("load-checkpoint"):
        together(groups.world, lambda: fill(parameters, source))
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}
    log.info("loaded %s, stored as %s, as %s", folder, str(source.dtype).removeprefix("torch."), ", ".join(dtypes))
