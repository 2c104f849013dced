"""The tensors that a run carries (core/models/carried.py): those that it begins with and does not train."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.run import RunConfig
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.local_folders import is_local
from megatron.core.models.carried import CarriedTensor, CarriedTensors
from megatron.core.models.hf.families import write_config
from megatron.core.models.hf.names import copied_tensors, table
from megatron.core.models.hf.side_files import side_folder
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mapping import Table, gather
from megatron.core.models.source import stored_dtype
from megatron.training.export import CheckpointSource


def carried_by(run: RunConfig, checkpoint: Path | None) -> CarriedTensors:
    """Returns the tensors that the checkpoints of a run hold besides its own: those of the checkpoint that it loads, or
    of --load-hf, and the layers that predict further tokens there and are not trained.

    Reads headers only. No communication. Raises CheckpointError.
    """
    if run.checkpoint.save is None:
        return CarriedTensors()
    if checkpoint is not None:
        if is_foreign(checkpoint) or is_local(checkpoint):  # no run that carries tensors saves local ones
            return CarriedTensors()
        return _carried_of(CheckpointSource(checkpoint), run.model.mtp_num_layers)
    if run.checkpoint.load_hf is None:
        return CarriedTensors()
    source = HFSource(Path(run.checkpoint.load_hf), run.checkpoint.load_adapter)
    return source.carried_with(run.model.mtp_num_layers)


def _carried_of(source: CheckpointSource, mtp_num_layers: int) -> CarriedTensors:
    """The carried tensors of a checkpoint, and its layers for prediction behind the first `mtp_num_layers`, which get
    the names of a Hugging Face folder. A model of no family, or of one without such layers, has no names for them."""
    model, carried = source.model, source.carried
    if model.mtp_num_layers <= mtp_num_layers:
        return carried
    try:
        family, config = write_config(model, side_folder(source.tokenizer, source.base), carried)
    except ConfigError:
        return carried
    if not family.predicts:
        return carried
    layout, copies = table(family, model), copied_tensors(family, model)
    depths = range(mtp_num_layers, model.mtp_num_layers)
    layers = tuple(f"model.layers.{(model.num_layers or 0) + depth}." for depth in depths)
    further = {
        name: _written(source, layout, name) for name in layout.theirs if name.startswith(layers) and name not in copies
    }
    return CarriedTensors(further | dict(carried.tensors), carried.config or config, carried.prefix)


def _written(source: CheckpointSource, layout: Table, name: str) -> CarriedTensor:
    """A tensor of a Hugging Face folder, as the weights of a checkpoint make it up."""
    dtype = stored_dtype(name, source.dtype)
    return CarriedTensor(dtype, layout.theirs[name], functools.partial(_read, source, layout, name, dtype))


def _read(source: CheckpointSource, layout: Table, name: str, dtype: torch.dtype, box: Box) -> Tensor:
    return gather(layout.of_theirs(name, box), box, dtype, lambda ours, part: source.read(ours, part, dtype))
