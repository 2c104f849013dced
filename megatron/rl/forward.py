"""The forward without gradients of [Note: two passes], and the weights that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.training.batch import Batch
from megatron.training.step import log_probabilities
from megatron.training.trainer import Trainer


def current_log_probabilities(trainer: Trainer, batches: Sequence[Batch]) -> Tensor:
    """Returns the log-probabilities of all labels under the weights that the model has, fp32 [rows, s].

    batches: microbatches of this replica. Communication: that of `log_probabilities`.
    """
    with trainer.groups.heartbeat.phase("log-probabilities"):
        values = log_probabilities(trainer.model, batches, trainer.groups, trainer.settings.pipeline)
    return torch.cat(values)


def with_weights(batches: Sequence[Batch], weights: Tensor) -> list[Batch]:
    """Returns the microbatches with the weights of their tokens' losses, of all rows [rows, s]."""
    parts = weights.float().split([len(batch.tokens) for batch in batches])
    return [dataclasses.replace(batch, weights=part) for batch, part in zip(batches, parts, strict=True)]
