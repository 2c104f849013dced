"""The carried tensors of a checkpoint (core/models/carried.py)."""

from __future__ import annotations

import functools

from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.core.models.carried import CarriedTensor, CarriedTensors
from megatron.training.saved_run import CARRIED_PREFIX


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
