"""Weights of tokens in the objective of the global batch.

The weights depend on the global batch alone, as [Note: gradient scale] of training/step.py explains for pretraining. So
the objective is a plain sum over replicas and microbatches.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron.rl.experience import Experience, sequence_lengths

Aggregation = Literal["token", "sequence", "constant"]


def local_counts(experience: Experience) -> Tensor:
    """Returns fp64 [2]: this replica's tokens where the mask is 1, and its sequences with such a token.

    The caller sums them over dp for `aggregation_weights`.
    """
    lengths = sequence_lengths(experience.mask, experience.sequences, experience.count)
    return torch.stack([lengths.sum(), lengths.count_nonzero().double()])


def aggregation_weights(
    experience: Experience, aggregation: Aggregation, totals: Tensor, max_length: int | None = None
) -> Tensor:
    """Returns the weights a_t of tokens, fp32 in the shape of the mask, 0 where the mask is 0.

    totals: `local_counts`, summed over the global batch. max_length: the longest response that can be sampled, for
    "constant".

    "token":     a_t = 1 / tokens of the batch                          (DAPO, arXiv 2503.14476; verl's default)
    "sequence":  a_t = 1 / (tokens of t's sequence x sequences)         (GRPO, arXiv 2402.03300)
    "constant":  a_t = 1 / (max_length x sequences)                     (Dr. GRPO, arXiv 2503.20783)

    Sequences without a token to train on count nowhere, so that rejected ones leave the denominators.
    """
    mask = experience.mask
    tokens, sequences = totals.clamp(min=1).unbind()
    if aggregation == "token":
        return (mask / tokens).float()
    if aggregation == "constant":
        assert max_length is not None, "the constant aggregation divides by the length of the longest response"
        return (mask / (max_length * sequences)).float()
    lengths = sequence_lengths(mask, experience.sequences, experience.count).clamp(min=1)
    return (mask / (lengths[experience.sequences] * sequences)).float()
