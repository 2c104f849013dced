"""The weight of the norm behind a delta net's state, which Megatron-LM stores minus one as all others.

With --apply-layernorm-1p it stores every norm minus one. Ours, as in the models of the hub, has this one as it is.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.mcore.delta_names import OUT_NORM
from megatron.core.models.mcore.training_state import Adam, TrainingState
from megatron.core.models.source import Source

MASTER = "master"


def is_zero_centered(model: ModelConfig, name: str) -> bool:
    """Returns whether Megatron-LM has the tensor of this name minus one, and we do not."""
    return model.apply_layernorm_1p and name.endswith(OUT_NORM)


def with_zero_centered(source: Source, training: TrainingState) -> tuple[Source, TrainingState]:
    """Returns both as Megatron-LM stores them."""
    if not any(is_zero_centered(source.model, name) for name in source.shapes):
        return source, training
    adam = training.adam
    if adam is None:
        return _Centered(source, None), training
    return _Centered(source, adam), dataclasses.replace(training, adam=_centered(adam, source.model))


class _Centered:
    """A source with these weights minus one, rounded once: from the optimizer's fp32 weights, if there are any."""

    def __init__(self, source: Source, adam: Adam | None) -> None:
        self.model, self.shapes, self.dtype = source.model, source.shapes, source.dtype
        self._source, self._adam = source, adam

    @property
    def carried(self) -> CarriedTensors:
        """See Source."""
        return self._source.carried

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source."""
        if not is_zero_centered(self.model, name):
            return self._source.read(name, box, dtype)
        if self._adam is not None:
            return (self._adam.read(name, MASTER, box) - 1.0).to(dtype)
        return (self._source.read(name, box, torch.float32) - 1.0).to(dtype)


def _centered(adam: Adam, model: ModelConfig) -> Adam:
    def read(name: str, key: str, box: Box) -> Tensor:
        values = adam.read(name, key, box)
        return values - 1.0 if key == MASTER and is_zero_centered(model, name) else values

    return dataclasses.replace(adam, read=read)
