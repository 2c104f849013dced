"""The weights with which training began, in host memory: the reference that the policy shall not leave too far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.training.initial_weights import initial_weights, weights_of
from megatron.training.start import find_pretrained
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel

log = get_logger(__name__)


class ReferenceWeights:
    """Copies of the trained parameters of this rank, which can take the place of the current ones for a while.

    They are copied as training holds them: whole, or this rank's slices where they are sharded. Under LoRA only
    adapters are trained, and so only they are copied. Host memory: twice their bytes while in place.
    """

    def __init__(self, trained: TrainedModel, *, is_anew: bool) -> None:
        """is_anew: whether the weights are those with which training begins. Those of a run that continues are made
        again, from the same seed or files. Collective over the world where files are read. Raises CheckpointError."""
        self._data_parallel = trained.data_parallel
        self._data_parallel.synchronize()
        if is_anew:
            self._weights = _copies(self._data_parallel.storages())
            return
        current = _copies(self._data_parallel.storages())
        run, groups = trained.run, trained.groups
        path = together(groups.world, lambda: pretrained_checkpoint(run.checkpoint))
        source = None if path is None else together(groups.world, lambda: weights_of(path, run.model))
        buffers = {name: buffer.clone() for name, buffer in trained.model.named_buffers()}
        with self._data_parallel.full_parameters():
            initial_weights(
                trained.parameters, groups, run.model, run.checkpoint, run.train.seed, path, source, buffers
            )
            self._data_parallel.write_back()
        self._weights = _copies(self._data_parallel.storages())
        _write(current, self._data_parallel.storages())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the reference's weights in the body."""
        self._data_parallel.synchronize()
        current = _copies(self._data_parallel.storages())
        _write(self._weights, self._data_parallel.storages())
        yield
        self._data_parallel.synchronize()
        _write(current, self._data_parallel.storages())


def pretrained_checkpoint(config: CheckpointConfig) -> Path | None:
    """Returns the checkpoint with whose weights training began; None where that was a seed or --load-hf.

    A line of the log says so of a seed, because the flags of a run that continues do not tell whether it began with
    --finetune. Raises CheckpointError.
    """
    if config.pretrained_checkpoint is not None:
        return find_pretrained(config.pretrained_checkpoint)
    if config.load_hf is None:
        log.warning(
            "the reference is the model as --seed makes it; if training began with the weights of a checkpoint, give "
            "them with --pretrained-checkpoint"
        )
    return None


@torch.no_grad()
def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def _write(values: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)
