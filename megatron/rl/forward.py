"""The forward without gradients of [Note: two passes], and the weights that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.training.batch import Batch
from megatron.training.expert_load import routing_of
from megatron.training.step import log_probabilities
from megatron.training.trainer import Trainer


def current_log_probabilities(
    trainer: Trainer, batches: Sequence[Batch], routings: Sequence[MicrobatchRouting] | None = None
) -> Tensor:
    """Returns the log-probabilities of all labels under the weights that the model has, fp32 [rows, s].

    batches: microbatches of this replica. routings: see `log_probabilities`. Communication: that of it.
    """
    with trainer.groups.heartbeat.phase("log-probabilities"):
        values = log_probabilities(trainer.model, batches, trainer.groups, trainer.settings.pipeline, routings)
    return torch.cat(values)


def routings_with_choices(trainer: Trainer, batches: Sequence[Batch]) -> list[MicrobatchRouting]:
    """Returns the routings of microbatches for a forward that keeps the choices of experts."""
    routings = [routing_of(batch, trainer.groups, trainer.model.sequence_shards) for batch in batches]
    for routing in routings:
        routing.choices = {}
    return routings


def with_weights(batches: Sequence[Batch], weights: Tensor) -> list[Batch]:
    """Returns the microbatches with the weights of their tokens' losses, of all rows [rows, s]."""
    parts = weights.float().split([len(batch.tokens) for batch in batches])
    return [dataclasses.replace(batch, weights=part) for batch, part in zip(batches, parts, strict=True)]
