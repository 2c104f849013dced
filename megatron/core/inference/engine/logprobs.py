"""Log-probabilities of given tokens, and of the likeliest ones, from hidden states, computed in blocks of rows.

[Note: logits in blocks]
Positions x vocabulary is by a wide margin the largest tensor of a model. The head is computed for some positions at a
time, and only a few numbers per position of each block are kept. Under tensor parallelism each rank keeps those of its
own shard of the vocabulary, and these are gathered, so every rank gets the same bits.

Probabilities are normalised over the model's own vocabulary: this excludes the rows that padding adds to a weight
matrix and includes ids that the tokenizer does not use. transformers and vLLM report the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_gather
from megatron.core.inference.engine.staged import StagedModel
from megatron.core.transformer.context import Build
from megatron.kernels.ops.cross_entropy import CrossEntropyKernel

BLOCK = 1 << 25  # number of logits that each rank computes at a time: 128 MB in fp32


class Logprobs(NamedTuple):
    """Results for n tokens, fp32: natural log-probability [n]; the likeliest tokens' ids [k, n] and log-probabilities
    [k, n].

    The ids are whole numbers in fp32, which is exact below 2^24.
    """

    chosen: Tensor
    ids: Tensor
    values: Tensor

    def packed(self) -> Tensor:
        """Returns one tensor [1 + 2 k, n] for communication."""
        return torch.cat([self.chosen.unsqueeze(0), self.ids, self.values])

    @staticmethod
    def unpack(packed: Tensor) -> Logprobs:
        """Inverse of `packed`."""
        k = len(packed) // 2
        return Logprobs(packed[0], packed[1 : 1 + k], packed[1 + k :])


def token_logprobs(
    model: StagedModel, build: Build, hidden: Tensor, tokens: Tensor, *, top: int, candidates: int
) -> Logprobs:
    """Returns log-probabilities of `tokens` [n], each after its row of hidden [n, h], and of the `top` likeliest ids.

    Only ids below `candidates` are among the likeliest. With `top` 1, the lowest of equally likely ids is returned.
    Call it on all tp ranks of the last stage. Communication: one all-gather over tp of [3 + 2 top, n].
    """
    top, tp, vocab = min(top, candidates), build.groups.tp, build.config.softmax_size
    assert candidates <= vocab < 1 << 24
    shard = build.config.padded_vocab_size // tp.size
    first, rows = tp.rank * shard, max(1, BLOCK // shard)
    kernel = build.kernels.fused.cross_entropy
    parts = [
        _summary(model.head(part.unsqueeze(1)).squeeze(1), wanted, first, vocab, top, candidates, kernel)
        for part, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True)
    ]
    # The tokens are on the second dim, because all-gather concatenates the first one.
    gathered = all_gather(torch.cat(parts, dim=1), tp).view(tp.size, 3 + 2 * top, len(tokens))
    largest, exp_sum, chosen = gathered[:, :3].unbind(dim=1)  # each [tp, n]
    log_sum_exp = _over_shards(largest, exp_sum)
    values = gathered[:, 3 : 3 + top].reshape(tp.size * top, len(tokens)).t()
    ids = gathered[:, 3 + top :].reshape(tp.size * top, len(tokens)).t()
    values, places = _largest(values, top)
    return Logprobs(chosen.sum(dim=0) - log_sum_exp, ids.gather(1, places).t(), values.t() - log_sum_exp)


def log_sum_exps(logits: Tensor, build: Build) -> Tensor:
    """Returns the log-sum-exps [n] in fp32 over the model's vocabulary, of logits [n, padded vocab] that were gathered
    over tp. They are computed from each rank's shard of the vocabulary, as in training. No communication."""
    vocab, shard = build.config.softmax_size, build.config.padded_vocab_size // build.groups.tp.size
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    statistics = [
        build.kernels.fused.cross_entropy.local_statistics(part[:, : max(0, vocab - rank * shard)], targets, 0)
        for rank, part in enumerate(logits.split(shard, dim=1))
    ]
    largest, exp_sum, _ = torch.stack(statistics, dim=1)
    return _over_shards(largest, exp_sum)


def _over_shards(largest: Tensor, exp_sum: Tensor) -> Tensor:
    """The largest logits and sums of exp(logit - largest) of each shard [tp, n] -> log-sum-exps [n]."""
    most = largest.amax(dim=0)
    return (exp_sum * (largest - most).exp()).sum(dim=0).log() + most


def _summary(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    vocab: int,
    top: int,
    candidates: int,
    kernel: CrossEntropyKernel,
) -> Tensor:
    """Logits [n, v] of ids first .. first + v - 1 -> fp32 [3 + 2 top, n]: `local_statistics`, the largest and their
    ids.
    """
    allowed = logits[:, : max(0, candidates - first)]
    largest = logits.new_zeros((2 * top, len(logits)), dtype=torch.float32)
    largest[:top] = float("-inf")
    if k := min(top, allowed.shape[1]):
        values, places = _largest(allowed, k)
        largest[:k], largest[top : top + k] = values.t(), places.t() + first
    return torch.cat([kernel.local_statistics(logits[:, : max(0, vocab - first)], tokens, first), largest])


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest values of each row [n, k] and their columns; for k = 1 the first column of equal ones."""
    top = values.max(dim=1, keepdim=True) if k == 1 else values.topk(k, dim=1)
    return top.values, top.indices
