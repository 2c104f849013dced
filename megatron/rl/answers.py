"""Answers with their rewards, and the rows of tokens in which they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.datasets.packing import best_fit_decreasing
from megatron.core.datasets.sft import PADDING, TRAINED
from megatron.training.batch import Batch, make_sft_batch

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The tokens of a prompt and of an answer to it, `ids`.

    mask: 1 for the tokens of `ids` that are trained on, 0 for those that an environment wrote; empty: all are trained
    on.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        """The places in `ids` of the tokens that are trained on."""
        return np.flatnonzero(self.mask) if self.mask else np.arange(len(self.ids))

    @property
    def inputs(self) -> int:
        """Tokens that a model has read when it has answered: all but the last one."""
        return self.length - 1


@dataclass(frozen=True, kw_only=True)
class Response(Answered):
    """An answer of the policy to a prompt, and what the reward function says about it; with an environment all of its
    answers, and the turns between them.

    prompt: number of the prompt in the run. number: of the answer in its group. logprobs: of the sampled tokens of
    `ids`, as the sampler computed them. sampler_rank: the rank of dp x cp that has sampled it. is_cut: the longest
    length is reached. failure: why there is no reward. numbers: further numbers of the reward function. turns: answers
    in `ids`.
    """

    prompt: int
    number: int
    logprobs: tuple[float, ...]
    sampler_rank: int
    text: str
    is_cut: bool
    reward: float
    failure: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    turns: int = 1


@dataclass(frozen=True)
class PackedAnswers:
    """Answers of a replica in rows of tokens. A token's values stand where it is the label, one place before it.

    batches: microbatches of rows, [b, s]. mask, fp32 [rows, s]: 1 where the label is a token to train on, else 0.
    sequences, int64 [rows, s]: number of the answer, from 0 to count - 1; 0 where the mask is 0.
    """

    batches: list[Batch]
    mask: Tensor
    sequences: Tensor
    count: int
    _places: Tensor  # int64 [tokens]: of the tokens to train on, answer after answer, in the flattened rows
    _lengths: Tensor  # int64 [count]: tokens to train on of each answer
    _inputs: Tensor  # int64 [tokens]: places of the tokens that a model has read when it has answered, as _places

    def of_tokens(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Returns values of the tokens to train on at their places, fp32 [rows, s], and 0 elsewhere."""
        flat = torch.tensor([value for answer in values for value in answer], dtype=torch.float32)
        return self._spread(flat)

    def of_answers(self, values: Sequence[float]) -> Tensor:
        """Returns each answer's value at its tokens to train on, fp32 [rows, s], and 0 elsewhere."""
        return self._spread(torch.tensor(values, dtype=torch.float32).repeat_interleave(self._lengths))

    def values_of_tokens(self, rows: Tensor) -> Tensor:
        """Returns the values of the answers' tokens, answer after answer, [tokens], of rows [rows, s]."""
        return rows.flatten()[self._places.to(rows.device)]

    def at_inputs(self, values: Tensor) -> Tensor:
        """Returns values [tokens, ...] of the tokens of prompts and answers, but for the last token of each answer, at
        these tokens [rows, s, ...], and 0 elsewhere."""
        rows = values.new_zeros(self.mask.numel(), *values.shape[1:])
        return rows.index_put_((self._inputs.to(values.device),), values).unflatten(0, self.mask.shape)

    def _spread(self, values: Tensor) -> Tensor:
        rows = torch.zeros(self.mask.shape).flatten().index_put((self._places,), values)
        return rows.view_as(self.mask).to(self.mask.device)


def shares(items: Sequence[_Item], count: int) -> list[Sequence[_Item]]:
    """Returns `count` runs of items, as equal as they can be."""
    return [items[n * len(items) // count : (n + 1) * len(items) // count] for n in range(count)]


def pack(
    replicas: Sequence[Sequence[Answered]],
    replica: int,
    *,
    seq_length: int,
    micro_batch_size: int,
    device: torch.device,
) -> PackedAnswers:
    """Returns the rows of one replica. All replicas get equally many: some rows may hold padding alone.

    replicas: the answers of each replica in a step. No communication.
    """
    rows_of = [_rows_of(answers, seq_length) for answers in replicas]
    rows = max(1, *(int(numbers.max(initial=-1)) + 1 for numbers in rows_of))
    rows = -(-rows // micro_batch_size) * micro_batch_size
    ids = np.zeros((rows, 3, seq_length), np.int64)
    ids[:, 1] = PADDING
    sequences = np.zeros((rows, seq_length), np.int64)
    ends, conversations = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    places, inputs = [], []
    for number, (answer, row) in enumerate(zip(replicas[replica], rows_of[replica], strict=True)):
        start, begin = ends[row], ends[row] + len(answer.prompt_ids)
        stop = begin + len(answer.ids)
        ids[row, 0, start:stop] = (*answer.prompt_ids, *answer.ids)
        trained = begin + answer.trained
        ids[row, 1, start:stop], ids[row, 1, trained] = 0, TRAINED
        ids[row, 2, start:stop] = conversations[row]
        sequences[row, trained - 1] = number
        places.append(row * seq_length + trained - 1)
        inputs.append(row * seq_length + np.arange(start, stop - 1))
        ends[row], conversations[row] = stop, conversations[row] + 1
    for row in range(rows):
        ids[row, 2, ends[row] :] = conversations[row]
    batches = [make_sft_batch(part.to(device), part) for part in torch.from_numpy(ids).split(micro_batch_size)]
    mask = torch.cat([batch.loss_mask for batch in batches]).float()
    return PackedAnswers(
        batches,
        mask,
        torch.from_numpy(sequences).to(device),
        len(replicas[replica]),
        torch.from_numpy(np.concatenate([*places, np.zeros(0, np.int64)])),
        torch.tensor([len(answer.trained) for answer in replicas[replica]], dtype=torch.int64),
        torch.from_numpy(np.concatenate([*inputs, np.zeros(0, np.int64)])),
    )


def _rows_of(answers: Sequence[Answered], seq_length: int) -> npt.NDArray[np.int64]:
    """Returns the row of each answer."""
    lengths = np.array([answer.length for answer in answers], np.int64)
    order = np.argsort(-lengths, kind="stable")
    numbers = np.empty_like(lengths)
    numbers[order] = best_fit_decreasing(lengths[order], seq_length)
    return numbers
