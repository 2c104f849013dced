"""Sampled tokens as an objective sees them, and sums over the sequences that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# [Note: token layout]
# Tensors of tokens have one common shape, usually [b, s]. A row may hold several sequences one after another, or one
# sequence and padding, and rows of several microbatches may be concatenated: functions of this package read the number
# of a token's sequence, never its row or column. So the layout of rows does not change a result. With context
# parallelism the caller gathers log-probabilities over cp, because a sequence must be whole on a rank.

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Experience:
    """The sampled tokens of a replica with all that an objective needs, in the shape of [Note: token layout].

    old: log-probabilities of the tokens under the trainer's parameters when they were sampled. sampler: those that the
    sampler reported. reference: those of the reference model; None: there is none. advantages: of the tokens. mask: 1
    where a sampled token is trained on, else 0. sequences, int64: the number of the token's sequence, from 0 to
    count - 1, unique in this replica; any of these numbers at padding. teacher: as reference, of the model that the
    advantages distil. All others are fp32 and finite, at padding too.
    """

    old: Tensor
    sampler: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequences: Tensor
    count: int
    teacher: Tensor | None = None


def sequence_sums(values: Tensor, mask: Tensor, sequences: Tensor, count: int) -> Tensor:
    """Returns the sum of `values` over the tokens of each sequence where the mask is 1, fp64 [count]. Differentiable.

    It sums in fp64: the log-probabilities of a long sequence add up to thousands, and DPO needs differences of sums.
    """
    tokens = torch.where(mask > 0, values, 0).double().flatten()
    return tokens.new_zeros(count).index_add(0, sequences.flatten(), tokens)


def sequence_lengths(mask: Tensor, sequences: Tensor, count: int) -> Tensor:
    """Returns the number of tokens of each sequence where the mask is 1, fp64 [count]."""
    return sequence_sums(torch.ones_like(mask), mask, sequences, count)


def at_level(values: Tensor, experience: Experience, level: Level) -> Tensor:
    """Returns fp32 values of tokens, in their shape, 0 where the mask is 0: the token's own value ("token"), or the sum
    ("sequence") or mean ("geometric") over its sequence.

    Of log-ratios, the last two are the logarithms of the ratio of sequences and of its geometric mean per token.
    """
    inside = experience.mask > 0
    if level == "token":
        return torch.where(inside, values, 0)
    numbers, count = experience.sequences, experience.count
    sums = sequence_sums(values, experience.mask, numbers, count)
    if level == "geometric":
        sums = sums / sequence_lengths(experience.mask, numbers, count).clamp(min=1)
    return torch.where(inside, sums.to(values.dtype)[numbers], 0)
