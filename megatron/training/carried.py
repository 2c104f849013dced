"""The tensors that a run keeps and does not train: of a checkpoint, or of the Hugging Face folder it began with."""

from __future__ import annotations

import functools
from pathlib import Path

from megatron.config.run import RunConfig
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.core.models.carried import CarriedTensor, CarriedTensors
from megatron.core.models.hf.source import HFSource
from megatron.training.saved_run import CARRIED_PREFIX, check_state


def carried_in(reader: WholeReader) -> CarriedTensors:
    """Returns the carried tensors of a checkpoint of ours. Raises CheckpointError."""
    state = reader.manifest.state.get("carried")
    if state is None:
        return CarriedTensors()
    tensors = {
        name.removeprefix(CARRIED_PREFIX): CarriedTensor(
            record.dtype, record.shape, functools.partial(reader.view, name)
        )
        for name, record in reader.manifest.tensors.items()
        if name.startswith(CARRIED_PREFIX)
    }
    return CarriedTensors(tensors, state["config"], state["prefix"])


def carried_by(run: RunConfig, checkpoint: Path | None) -> CarriedTensors:
    """Returns the tensors that the checkpoints of a run hold besides its own: those of the checkpoint that it loads, or
    of --load-hf. Reads headers only. No communication. Raises CheckpointError."""
    if run.checkpoint.save is None:
        return CarriedTensors()
    if checkpoint is not None:
        if is_foreign(checkpoint):
            return CarriedTensors()
        reader = WholeReader(checkpoint)
        check_state(checkpoint, reader.manifest.state)
        return carried_in(reader)
    if run.checkpoint.load_hf is None:
        return CarriedTensors()
    source = HFSource(Path(run.checkpoint.load_hf), run.checkpoint.load_adapter)
    return source.carried_beside(run.model.mtp_num_layers)
