"""Writes Megatron-LM's classic checkpoints, which it loads with --ckpt-format torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.core.models.mapping import Read, Table, gather
from megatron.core.models.mcore.arguments import refuse_what_has_no_argument
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.names import CheckpointLayout, padded_rows, table
from megatron.core.models.mcore.publish import published
from megatron.core.models.mcore.training_state import MOMENTS, Adam, TrainingState, arguments_for, param_groups
from megatron.core.models.source import Source
from megatron.spec.decoder import OUTPUT_LAYER


def write_mcore(
    source: Source,
    root: Path,
    *,
    tp: int,
    pp: int,
    fused_norms: bool,
    dtype: torch.dtype,
    training: TrainingState,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Writes the checkpoint of `training` under `root` for tp x pp ranks, and the tracker.

    The optimizer is the one that is not distributed; `fused_norms` selects Transformer Engine's layers and Adam.
    Memory: one rank's weights and optimizer state. Raises CheckpointError if the checkpoint exists, ConfigError for an
    impossible layout or a model that Megatron-LM has no arguments for, and OSError, leaving nothing.
    """
    model = source.model
    assert model.num_layers
    if model.num_layers % pp:
        raise ConfigError(f"--target-pipeline-parallel-size {pp} does not divide the model's {model.num_layers} layers")
    refuse_what_has_no_argument(model)
    layout = CheckpointLayout(tp, pp, (model.num_layers // pp,) * pp, fused_norms, padded_rows(model, tp))
    names = table(model, layout, copies=True)
    arguments = arguments_for(model, layout, dtype, training)
    with published(root, training) as temporary:
        for folder in (layout.folder(rank, stage) for stage in range(pp) for rank in range(tp)):
            rank = _Rank(names, layout, folder, on_bytes)
            _save(temporary / folder, rank.content(source, arguments, dtype, training))
    return root / training.folder


class _Rank:
    """The tensors of one rank."""

    def __init__(self, names: Table, layout: CheckpointLayout, folder: str, on_bytes: Callable[[int], None]) -> None:
        self._names, self._layout, self._on_bytes = names, layout, on_bytes
        keys = {key.split("/", 2)[2]: key for key in names.theirs if key.startswith(f"{folder}/")}
        self._keys = dict(
            sorted(keys.items(), key=lambda item: item[0] == OUTPUT_LAYER)
        )  # a copy of the embedding is last

    def content(
        self, source: Source, arguments: argparse.Namespace, dtype: torch.dtype, training: TrainingState
    ) -> dict[str, Any]:
        """Returns the content of the rank's file."""
        weights = {name: self._read(name, dtype, lambda n, box: source.read(n, box, dtype)) for name in self._keys}
        content = training.common(arguments) | {"model": weights}
        if training.adam and training.scheduler:
            content["optimizer"] = self._optimizer(training.adam, training.scheduler, dtype)
        return content

    def _optimizer(self, adam: Adam, scheduler: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Returns the state of the optimizer in the format of the Adam that will load it.

        [Note: formats of Adam's step count]
        torch's Adam, which Megatron-LM uses if neither Transformer Engine nor Apex is installed, counts updates per
        parameter, in a separate tensor; those two count them per group, and Transformer Engine's fails on unknown
        entries.
        """
        matrices = [name for name in self._keys if len(self._names.theirs[self._keys[name]]) > 1]
        vectors = [name for name in self._keys if name not in matrices]
        state = {
            number: {key: self._state(adam, key, name) for key in MOMENTS}
            for number, name in enumerate((*matrices, *vectors))
        }
        if not self._layout.fused_norms:
            for held in state.values():
                held["step"] = torch.tensor(float(adam.updates))
        groups = param_groups(adam, scheduler)
        groups[0]["params"] = list(range(len(matrices)))
        groups[1]["params"] = list(range(len(matrices), len(self._keys)))
        found = {"state": state, "param_groups": groups}
        if dtype == torch.float32:
            return found
        masters = [[self._state(adam, "master", name) for name in group] for group in (matrices, vectors)]
        wrapped: dict[str, Any] = {"optimizer": found, "fp32_from_fp16_params": masters}
        return wrapped | ({"grad_scaler": adam.loss_scale} if adam.loss_scale else {})

    def _state(self, adam: Adam, key: str, name: str) -> Tensor:
        return self._read(name, torch.float32, lambda own, box: adam.read(own, key, box))

    def _read(self, name: str, dtype: torch.dtype, read: Read) -> Tensor:
        key = self._keys[name]
        shape = self._layout.full_shape(name, self._names.theirs[key])
        whole = Box((0,) * len(shape), shape)
        found = gather(self._names.of_theirs(key, whole), whole, dtype, read)
        self._on_bytes(found.nbytes)
        return found


def _save(folder: Path, content: Mapping[str, Any]) -> None:
    folder.mkdir()
    with open(folder / FILE, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
