"""Compares the log-probabilities that generation reports with those of the forward pass of training.

With --batch-invariant-mode they are the same bits. Without it they differ by rounding, because generation decodes one
token at a time, in other batches and against a cache of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.staged import StagedModel
from megatron.core.inference.generate import generate
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build
from megatron.kernels.ops.attention_segments import Segments, segments_of


@dataclass(frozen=True)
class SampledSequence:
    """A prompt, and the tokens that were sampled behind it with their natural log-probabilities."""

    prompt: Sequence[int]
    sampled: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.prompt, *self.sampled]


class LogprobDifference(NamedTuple):
    """The share of tokens with the same bits, the largest absolute difference, and the estimate k3 of the divergence:
    the mean of exp(d) - 1 - d with d = training's log-probability - generation's."""

    tokens: int
    equal: float
    largest: float
    k3: float


def sample(
    model: GPTModel, build: Build, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], **options: Any
) -> list[SampledSequence]:
    """Continues prompts and returns them with their log-probabilities. Arguments and communication: see `generate`."""
    completions = generate(model, build, tokenizer, prompts, logprobs=True, **options)
    return [
        SampledSequence(prompt, completion.ids, completion.logprobs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class PackedRows(NamedTuple):
    """Sequences as documents of rows: tokens, labels, positions and ids of documents [b, s], int64 in host memory.

    places: the row, the first column and the number of labels of each sequence's sampled tokens.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    ids: Tensor
    places: list[tuple[int, int, int]]


def pack(sequences: Sequence[SampledSequence], per_row: int, multiple: int = 1) -> PackedRows:
    """Returns rows of up to `per_row` sequences each, padded to the longest row and to a multiple of `multiple`."""
    rows = [sequences[first : first + per_row] for first in range(0, len(sequences), per_row)]
    longest = max(sum(len(sequence.ids) - 1 for sequence in row) for row in rows)
    shape = len(rows), math.ceil(longest / multiple) * multiple
    tokens, labels, positions, ids = (torch.zeros(shape, dtype=torch.int64) for _ in range(4))
    places = []
    for number, row in enumerate(rows):
        start = 0
        for document, sequence in enumerate(row, start=1):
            words = torch.tensor(sequence.ids)
            part = slice(start, start + len(words) - 1)
            tokens[number, part], labels[number, part] = words[:-1], words[1:]
            positions[number, part], ids[number, part] = torch.arange(len(words) - 1), document
            count = len(sequence.sampled)
            places.append((number, part.stop - count, count))
            start = part.stop
    return PackedRows(tokens, labels, positions, ids, places)


def trained_logprobs(
    model: GPTModel, build: Build, sequences: Sequence[SampledSequence], *, per_row: int = 1, rows: int | None = None
) -> list[list[float]] | None:
    """Returns the log-probabilities of the sampled tokens in a forward pass with labels; None but on the last stage.

    per_row: sequences that share a row as its documents. rows: of a microbatch; default all. Gradients are recorded as
    the caller has it. Communication: that of a forward, and of the stages: see StagedModel.
    """
    staged, device = StagedModel(model, build), build.device
    packed = pack(sequences, per_row, model.sequence_shards)
    results = []
    for part in _microbatches(packed, rows or len(packed.tokens)):
        segments: Segments | None = None if per_row == 1 else segments_of(part.ids, device)
        losses = staged.losses(part.tokens.to(device), part.positions.to(device), part.labels.to(device), segments)
        if losses is not None:
            results += [(-losses[row, start : start + count]).tolist() for row, start, count in part.places]
    return results or None


def _microbatches(packed: PackedRows, rows: int) -> list[PackedRows]:
    return [
        PackedRows(
            packed.tokens[first : first + rows],
            packed.labels[first : first + rows],
            packed.positions[first : first + rows],
            packed.ids[first : first + rows],
            [(row - first, start, n) for row, start, n in packed.places if first <= row < first + rows],
        )
        for first in range(0, len(packed.tokens), rows)
    ]


def difference(sampled: Sequence[SampledSequence], trained: Sequence[Sequence[float]]) -> LogprobDifference:
    """Compares the log-probabilities of sequences with those of training."""
    pairs = [
        pair for one, other in zip(sampled, trained, strict=True) for pair in zip(one.logprobs, other, strict=True)
    ]
    gaps = [after - before for before, after in pairs]
    k3 = math.fsum(math.expm1(gap) - gap for gap in gaps) / len(gaps)
    return LogprobDifference(len(gaps), gaps.count(0.0) / len(gaps), max(map(abs, gaps)), k3)
