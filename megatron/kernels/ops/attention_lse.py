"""Attention of one block of queries to one block of keys, with its log-sum-exp, so that blocks can be merged.

Blocks of the same queries are merged by their log-sum-exps; the gradient of each block then follows from the merged
output and log-sum-exp alone (Dao, arXiv 2307.08691). `reference` is plain torch in fp32 and defines the contract of the
other kernels.

[Note: dropout in blocks]
Probabilities are dropped after normalisation, so the log-sum-exp is that of all keys, and a block's dropped output is
merged like any other. With factors F, O = sum (F P) V and dS = P (F dP - D), where D = sum P (F dP) = sum dO O as
without dropout. F must be the same in backward, where the block boundaries may differ: see `Drop`. The fused kernels
draw their own factors, depending on the position in their call, so `with_dropout` passes blocks with dropout to
`by_rows`: the reference, some queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.backends import flash3
from megatron.kernels.ops import attention_lse_cpu, attention_lse_cuda
from megatron.kernels.ops.attention_rule import Drop, Rule, padded
from megatron.spec.work_space import ATTENTION_MATRIX


class Forward(Protocol):
    """q [s, b, n, d]; k [t, b, g, d]; v [t, b, g, v], where g divides n -> output [s, b, n, v], log-sum-exp [b, n, s]
    in fp32.

    The output is in q's dtype or fp32. A query that sees none of the keys gets output 0 and log-sum-exp -inf.
    `rule.drop` is None except for kernels that are documented to support it.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Returns this block's contribution to the gradients of q, k and v, in q's dtype or fp32.

    grad, out [s, b, n, v] and lse [b, n, s] belong to the attention to all blocks, not to this block alone.
    """

    def __call__(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]: ...


Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # see `merge_`


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block's result into `out` [s, b, n, v] and `lse` [b, n, s], in place, in their dtype (fp32 or wider).

    A query may have no key so far (`out` 0, `lse` -inf) or none in the block; a query without a key in either becomes
    NaN.
    """
    total = torch.logaddexp(lse, block_lse)
    share = (block_lse - total).exp_().permute(2, 0, 1).unsqueeze(-1)  # weight of the block in the sum
    out.lerp_(block_out.to(out.dtype), share)
    lse.copy_(total)


class BlockKernel(NamedTuple):
    """Attention of a block, its gradient, and the merge of results. No communication."""

    forward: Forward
    backward: Backward
    merge: Merge = merge_


def in_fp32(kernel: BlockKernel) -> BlockKernel:
    """Wraps `kernel` to run on fp32 copies of half-precision tensors."""

    def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        return kernel.forward(q.float(), k.float(), v.float(), rule)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel.backward(grad.float(), q.float(), k.float(), v.float(), out.float(), lse, rule)

    return BlockKernel(forward, backward)


def prefix_apart(kernel: BlockKernel) -> BlockKernel:
    """Splits attention to a block's own keys and earlier ones into two calls, so that `kernel` needs no mask."""

    def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        before = rule.prefix(len(q), len(k))
        if not before:
            return kernel.forward(q, k, v, rule)
        out, lse = kernel.forward(q, k[before:], v[before:], rule._replace(offset=0))
        out = _wide(out)
        merge_(out, lse, *kernel.forward(q, k[:before], v[:before], rule._replace(offset=None)))
        return out, lse

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        before = rule.prefix(len(q), len(k))
        if not before:
            return kernel.backward(grad, q, k, v, out, lse, rule)
        dq, *causal = kernel.backward(grad, q, k[before:], v[before:], out, lse, rule._replace(offset=0))
        prefix_dq, *prefix = kernel.backward(grad, q, k[:before], v[:before], out, lse, rule._replace(offset=None))
        dk, dv = (torch.cat(pair) for pair in zip(prefix, causal, strict=True))
        return _wide(dq) + prefix_dq, dk, dv

    return BlockKernel(forward, backward)


def with_equal_channels(kernel: BlockKernel) -> BlockKernel:
    """Wraps `kernel` to get heads of as many channels in queries, keys and values: see
    attention.with_equal_channels."""

    def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        width = max(q.shape[-1], v.shape[-1])
        out, lse = kernel.forward(padded(q, width), padded(k, width), padded(v, width), rule)
        return out[..., : v.shape[-1]], lse

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels, values = q.shape[-1], v.shape[-1]
        grad, q, k, v, out = (padded(x, max(channels, values)) for x in (grad, q, k, v, out))
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, rule)
        return dq[..., :channels], dk[..., :channels], dv[..., :values]

    return BlockKernel(forward, backward)


def with_dropout(kernel: BlockKernel) -> BlockKernel:
    """Wraps `kernel`; rules with dropout go to `by_rows`. See [Note: dropout in blocks]."""

    def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        return (kernel if rule.drop is None else by_rows).forward(q, k, v, rule)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (kernel if rule.drop is None else by_rows).backward(grad, q, k, v, out, lse, rule)

    return BlockKernel(forward, backward)


def rows_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """As `reference_forward`, with at most ATTENTION_MATRIX weights at a time. Supports `rule.drop`."""
    parts = [reference_forward(q[rows], k[:reach], v[:reach], cut) for rows, reach, cut in _some_rows(q, len(k), rule)]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=-1)


def rows_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `rows_forward`, some queries at a time."""
    queries, dk, dv = [], _wide(torch.zeros_like(k)), _wide(torch.zeros_like(v))
    for rows, reach, cut in _some_rows(q, len(k), rule):
        arguments = grad[rows], q[rows], k[:reach], v[:reach], out[rows], lse[..., rows]
        dq, *of_keys = reference_backward(*arguments, cut)
        queries.append(dq)
        for total, part in zip((dk, dv), of_keys, strict=True):
            total[:reach] += part
    return torch.cat(queries), dk, dv


def _some_rows(q: Tensor, t: int, rule: Rule) -> Iterator[tuple[slice, int, Rule]]:
    """Yields (queries, number of keys they may see, their rule), with at most ATTENTION_MATRIX probabilities at a
    time."""
    s, b, n, _ = q.shape
    step = max(1, ATTENTION_MATRIX // (b * n * t))
    for start in range(0, s, step):
        stop = min(s, start + step)
        reach = t if rule.offset is None else min(t, rule.offset + stop)
        offset = None if rule.offset is None else rule.offset + start
        cut = rule.cut(slice(start, stop), slice(0, reach))
        yield slice(start, stop), reach, cut._replace(offset=offset, window=rule.window)


def _scores(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    """Returns the scores [b, g, m, s, t] of q [s, b, g, m, d] and k [t, b, g, d], also where the rule hides the key."""
    return rule.scores.capped(torch.einsum("sbgmd,tbgd->bgmst", q, k) / rule.scores.divisor)


def _probabilities(scores: Tensor, lse: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Overwrites scores [b, g, m, s, t] with the weights; returns them and the log-sum-exp [b, g, m, s].

    `lse` None computes the block's own log-sum-exp.
    """
    s, t = scores.shape[-2:]
    mask = rule.mask(s, t, scores.device)
    if mask is not None:
        scores.masked_fill_(~(mask if mask.dim() == 2 else mask.unsqueeze(1)), float("-inf"))
    if lse is None:
        lse = scores.logsumexp(dim=-1)
    # -inf - -inf is NaN, so the scores of a query without keys are compared with 0 instead.
    base = lse.masked_fill(lse.isneginf(), 0.0)
    return scores.sub_(base.unsqueeze(-1)).exp_(), lse


def reference_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Plain torch in fp32, or in fp64 for fp64 inputs. Materializes the block's [b, n, s, t] weights. Supports
    `rule.drop`.
    """
    q, k, v = _wide(q, k.shape[2]), _wide(k), _wide(v)
    weights, lse = _probabilities(_scores(q, k, rule), None, rule)
    if rule.drop is not None:
        weights.mul_(_factors(rule.drop, q))
    return _by_keys(weights, v), lse.flatten(1, 2)


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the softmax from the merged log-sum-exp: dS = P * (dP - sum(grad * out)), times the slope of a
    cap.

    Supports `rule.drop`.
    """
    groups = k.shape[2]
    grad, q, out, k, v = _wide(grad, groups), _wide(q, groups), _wide(out, groups), _wide(k), _wide(v)
    scores = _scores(q, k, rule)
    slope = rule.scores.slope(scores)
    weights, _ = _probabilities(scores, lse.unflatten(1, q.shape[2:4]), rule)
    delta = (grad * out).sum(-1).permute(1, 2, 3, 0)  # [b, g, m, s]
    factors = None if rule.drop is None else _factors(rule.drop, q)
    into_weights = torch.einsum("sbgmd,tbgd->bgmst", grad, v)
    if factors is not None:
        into_weights.mul_(factors)
    into_scores = into_weights.sub_(delta.unsqueeze(-1)).mul_(weights)
    if slope is not None:
        into_scores.mul_(slope)
    products = into_scores.div_(rule.scores.divisor)
    if factors is not None:
        weights.mul_(factors)
    dq = _by_keys(products, k)
    dk = torch.einsum("bgmst,sbgmd->tbgd", products, q)
    dv = torch.einsum("bgmst,sbgmd->tbgd", weights, grad)
    return dq, dk, dv


def _by_keys(weights: Tensor, x: Tensor) -> Tensor:
    """Returns the sums over keys of weights [b, g, m, s, t] and x [t, b, g, d]: [s, b, g * m, d]. The queries of a
    group stay in the order of the weights, of which einsum makes no copy then."""
    return torch.einsum("bgmst,tbgd->bgmsd", weights, x).permute(3, 0, 1, 2, 4).flatten(2, 3)


def _factors(drop: Drop, q: Tensor) -> Tensor:
    """Returns the dropout factors [b, g, m, s, t] for q [s, b, g, m, d]."""
    _, b, g, m, _ = q.shape
    return drop.factors(b, g * m).unflatten(1, (g, m))


def _wide(x: Tensor, groups: int | None = None) -> Tensor:
    """Returns x in fp32 or wider; with `groups`, heads [.., n, d] become [.., g, n / g, d]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if groups is None else x.unflatten(2, (groups, -1))


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention on CUDA, or the reference if it does not support the head size."""
    if not attention_lse_cuda.efficient_takes(q, v):
        return reference_forward(q, k, v, rule)
    return attention_lse_cuda.efficient_forward(q, k, v, rule)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `efficient_forward`."""
    if not attention_lse_cuda.efficient_takes(q, v):
        return reference_backward(grad, q, k, v, out, lse, rule)
    return attention_lse_cuda.efficient_backward(grad, q, k, v, out, lse, rule)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """FlashAttention on CUDA, or `efficient_forward` for the unsupported cases (segments, unusual head sizes)."""
    if not attention_lse_cuda.flash_takes(q, k, rule):
        return efficient_forward(q, k, v, rule)
    return attention_lse_cuda.flash_forward(q, k, v, rule)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `flash_forward`."""
    if not attention_lse_cuda.flash_takes(q, k, rule):
        return efficient_backward(grad, q, k, v, out, lse, rule)
    return attention_lse_cuda.flash_backward(grad, q, k, v, out, lse, rule)


def flash3_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """FlashAttention-3 on Hopper, or another kernel for the unsupported cases (segments, more queries than keys)."""
    if rule.segments is None and rule.in_reach(len(q), len(k)):
        return flash3.block_forward(q, k, v, rule)
    return (efficient if rule.scores.softcap is None else by_rows).forward(q, k, v, rule)


def flash3_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `flash3_forward`."""
    if rule.segments is None and rule.in_reach(len(q), len(k)):
        return flash3.block_backward(grad, q, k, v, out, lse, rule)
    return (efficient if rule.scores.softcap is None else by_rows).backward(grad, q, k, v, out, lse, rule)


reference = BlockKernel(reference_forward, reference_backward)
by_rows = BlockKernel(rows_forward, rows_backward)
cpu = with_equal_channels(prefix_apart(BlockKernel(attention_lse_cpu.forward, attention_lse_cpu.backward)))
efficient = prefix_apart(BlockKernel(efficient_forward, efficient_backward))
flash_attention = with_equal_channels(BlockKernel(flash_forward, flash_backward))
flash_attention_3 = BlockKernel(flash3_forward, flash3_backward)
