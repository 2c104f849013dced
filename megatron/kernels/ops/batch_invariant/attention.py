"""Attention over keys in fixed blocks that are counted from a sequence's own first key.

A query goes over the blocks of its own document in ascending order, and merges each with a running maximum and sum
(online softmax: Milakov and Gimelshein, arXiv 1805.02867). Every product has the shape of one block of queries and one
block of keys, in fp32: see [Note: fixed shapes] in the package. A block whose keys are all hidden from a query changes
none of its numbers: they are multiplied by exp(0) = 1, and 0 is added. So it does not matter which blocks of keys the
other queries of its block need, and the result of a query is the same in training, where its sequence may be packed
with others, in a padded batch of prompts, and alone against a cache of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, ids_of
from megatron.kernels.ops.attention_sinks import add_sinks_, gradient_of_sinks

KEYS, QUERIES = 64, 8  # of a block
_COPIED = 1 << 24  # elements of keys that are copied at a time to the blocks of queries that read them


# (q, k, v, scores, ids, window) -> output and log-sum-exps: see `forward`
KeyBlocksForward = Callable[
    [Tensor, Tensor, Tensor, Scores, Tensor | None, int | None],
    tuple[Tensor, Tensor],
]


def in_key_blocks(forward: KeyBlocksForward, gradient: BlockKernel) -> AttentionKernel:
    """Returns the kernel. gradient: computes its backward from its output and log-sum-exps. It has no dropout."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        assert dropout == 0.0, "a rule refuses dropout"
        sinks, ids = scores.sinks, ids_of(segments)
        out: Tensor = _Attend.apply(q, k, v, sinks, scores.of_keys, ids, window, forward, gradient)
        return out.flatten(2)

    return attention


class _Attend(torch.autograd.Function):
    """q [s, b, n, d]; k [t, b, g, d]; v [t, b, g, v]; sinks [n] -> [s, b, n, v]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scores: Scores,
        ids: Tensor | None,
        window: int | None,
        forward: KeyBlocksForward,
        gradient: BlockKernel,
    ) -> Tensor:
        out, lse = forward(q, k, v, scores, ids, window)
        if sinks is not None:
            wide, lse = out.to(lse.dtype), lse.contiguous()
            add_sinks_(wide, lse, sinks)
            out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, ids)
        ctx.scores, ctx.window, ctx.gradient = scores, window, gradient
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, ids = ctx.saved_tensors
        of_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        segments = None if ids is None else (ids[:, -len(q) :], ids)
        rule = Rule(ctx.scores, len(k) - len(q), ctx.window, segments)
        gradients = ctx.gradient.backward(grad, q, k, v, out, lse, rule)
        dq, dk, dv = (of_argument.to(q.dtype) for of_argument in gradients)
        return dq, dk, dv, of_sinks, None, None, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, ids: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the output [s, b, n, v] in q's dtype, and log-sum-exps [b, n, s] in fp32. ids [b, t]: of documents."""
    (s, b, n, _), (t, _, groups, channels) = q.shape, v.shape
    documents = _documents(ids, s, t, b, q.device)
    queries = _query_blocks(documents, s, t, b)
    keys = _KeyBlocks(documents, b, k, v)
    out = q.new_zeros(s * b, n, channels)
    lse = q.new_zeros(s * b, n, dtype=torch.float32)
    for part in queries.parts(max(1, _COPIED // (KEYS * k[0, 0].numel()))):
        rows = q.flatten(0, 1).index_select(0, part.rows.clamp(min=0).flatten()).float()
        rows = rows.view(-1, QUERIES, groups, n // groups, q.shape[-1]).transpose(1, 2)
        summed, log_sums = _attend(rows.flatten(2, 3), part, keys, scores, window)
        present = part.rows >= 0
        for results, of_blocks in ((out, summed), (lse, log_sums)):  # [Q, g, QUERIES * m, ...]
            by_query = of_blocks.unflatten(2, (QUERIES, -1)).transpose(1, 2).flatten(2, 3)
            results[part.rows[present]] = by_query[present].to(results.dtype)
    return out.view(s, b, n, channels), lse.view(s, b, n).permute(1, 2, 0)


@dataclass(frozen=True)
class _Documents:
    """The documents that have queries: int64 [D] each. A document begins at position `start` of its sample, ends before
    `stop`, and has queries from position `first_query` on. first_block: its first block of keys among those of all."""

    sample: Tensor
    start: Tensor
    stop: Tensor
    first_query: Tensor
    first_block: Tensor
    blocks: int


def _documents(ids: Tensor | None, s: int, t: int, b: int, device: torch.device) -> _Documents:
    """Documents are neighbouring tokens of a sample with equal ids; queries are the last s of t tokens."""
    begins = torch.zeros(b, t, dtype=torch.bool, device=device)
    begins[:, 0] = True
    if ids is not None:
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    places = begins.flatten().nonzero().flatten()
    sample, start = places // t, places % t
    stop = torch.cat((places[1:], places.new_tensor([b * t]))) - sample * t
    relevant = stop > t - s
    sample, start, stop = sample[relevant], start[relevant], stop[relevant]
    ends = ((stop - start + KEYS - 1) // KEYS).cumsum(0)
    first_block = ends - (stop - start + KEYS - 1) // KEYS
    return _Documents(sample, start, stop, start.clamp(min=t - s), first_block, int(ends[-1]))


@dataclass(frozen=True)
class _QueryBlocks:
    """Q blocks of queries, those with the latest positions first.

    rows [Q, QUERIES]: a query's row among the s * b queries, -1 for none. positions [Q, QUERIES]: in its document.
    first_block [Q]: the first block of keys of its document.
    """

    rows: Tensor
    positions: Tensor
    first_block: Tensor

    def parts(self, size: int) -> Iterator[_QueryBlocks]:
        """Yields at most `size` blocks at a time."""
        tensors = (self.rows, self.positions, self.first_block)
        for columns in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            yield _QueryBlocks(*columns)


def _query_blocks(documents: _Documents, s: int, t: int, b: int) -> _QueryBlocks:
    counts = (documents.stop - documents.first_query + QUERIES - 1) // QUERIES
    document = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(document), device=counts.device) - (counts.cumsum(0) - counts)[document]
    first = documents.first_query[document] + number * QUERIES
    places = first.unsqueeze(1) + torch.arange(QUERIES, device=counts.device)
    absent = places >= documents.stop[document].unsqueeze(1)
    rows = ((places - (t - s)) * b + documents.sample[document].unsqueeze(1)).masked_fill(absent, -1)
    positions = places - documents.start[document].unsqueeze(1)
    positions = torch.where(absent, positions[:, :1], positions)
    order = positions.amax(1).argsort(descending=True, stable=True)
    return _QueryBlocks(rows[order], positions[order], documents.first_block[document][order])


class _KeyBlocks:
    """Keys [B, g, KEYS, d] and values [B, g, KEYS, v] of all documents in fp32, zeros behind the end of each."""

    def __init__(self, documents: _Documents, b: int, k: Tensor, v: Tensor) -> None:
        lengths = documents.stop - documents.start
        counts = (lengths + KEYS - 1) // KEYS
        document = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        number = torch.arange(documents.blocks, device=counts.device) - documents.first_block[document]
        places = (documents.start[document] + number * KEYS).unsqueeze(1) + torch.arange(KEYS, device=counts.device)
        self._absent = places >= documents.stop[document].unsqueeze(1)
        self._rows = (places * b + documents.sample[document].unsqueeze(1)).masked_fill(self._absent, 0)
        self.keys, self.values = (self._blocks(x.flatten(0, 1)) for x in (k, v))

    def _blocks(self, x: Tensor) -> Tensor:
        """x [t * b, g, channels]."""
        blocks = x.index_select(0, self._rows.flatten()).float().view(*self._rows.shape, *x.shape[1:])
        return blocks.masked_fill_(self._absent[:, :, None, None], 0.0).transpose(1, 2).contiguous()


def _attend(
    q: Tensor, part: _QueryBlocks, blocks: _KeyBlocks, scores: Scores, window: int | None
) -> tuple[Tensor, Tensor]:
    """q [Q, g, QUERIES * m, d] -> output [Q, g, QUERIES * m, v], log-sum-exps [Q, g, QUERIES * m].

    The blocks that need a block of keys are the first ones: positions descend.
    """
    count, groups, rows, _ = q.shape
    m, latest = rows // QUERIES, part.positions.amax(1)
    q = q.flatten(0, 1)
    out = q.new_zeros(len(q), rows, blocks.values.shape[-1])
    largest, total = q.new_full((len(q), rows), float("-inf")), q.new_zeros(len(q), rows)
    positions = part.positions.repeat_interleave(m, dim=1)[:, None, :, None]  # [Q, 1, QUERIES * m, 1]
    seen = 0 if window is None else max(0, int(part.positions.amin()) - window + 1) // KEYS
    needed = (latest.unsqueeze(0) >= torch.arange(0, int(latest[0]) + 1, KEYS, device=q.device).unsqueeze(1)).sum(1)
    for number, active in enumerate(needed.tolist()):
        if number < seen:
            continue
        chosen, end = part.first_block[:active] + number, active * groups
        keys, values = (x.index_select(0, chosen).flatten(0, 1) for x in (blocks.keys, blocks.values))
        products = torch.bmm(q[:end], keys.transpose(1, 2)).mul_(scores.scale)
        products = scores.capped(products).view(active, groups, rows, KEYS)
        key = torch.arange(number * KEYS, (number + 1) * KEYS, device=q.device)
        hidden = key > positions[:active]
        if window is not None:
            hidden |= key <= positions[:active] - window
        products = products.masked_fill_(hidden, float("-inf")).view(end, rows, KEYS)
        highest = torch.maximum(largest[:end], products.amax(-1))
        base = highest.masked_fill(highest.isneginf(), 0.0)
        weights, share = products.sub_(base.unsqueeze(-1)).exp_(), (largest[:end] - base).exp_()
        total[:end] = total[:end] * share + weights.sum(-1)
        out[:end] = out[:end] * share.unsqueeze(-1) + torch.bmm(weights, values)
        largest[:end] = highest
    shape = (count, groups, rows)
    return out.div_(total.unsqueeze(-1)).view(*shape, -1), (largest + total.log()).view(shape)
