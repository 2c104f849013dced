"""Cross entropy over logits whose vocabulary is sharded over tp: no rank ever holds the full row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.regions import Reduce
from megatron.core.groups import Group
from megatron.kernels.ops.cross_entropy import CrossEntropyKernel, local_targets, separate
from megatron.kernels.ops.softcap import slope, softcap_


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        valid: int,
        tp: Group,
        scaling: float,
        softcap: float | None,
        kernel: CrossEntropyKernel,
        z_loss: float,
        reduce: Reduce,
    ) -> Tensor:
        # Contiguous, because backward writes the gradient through a flat view: of a copy it would be lost. Detached,
        # because with --tp-comm-overlap the linear layer returns a view, and autograd saves none that was changed.
        logits = logits.detach().contiguous()
        if scaling != 1.0:
            logits.div_(scaling)
        if softcap is not None:
            softcap_(logits, softcap)
        flat, ids = logits.flatten(0, -2), targets.flatten()
        largest, exp_sum, target = kernel.local_statistics(flat[:, :valid], ids, first)
        if tp.size > 1:
            local_largest = largest.clone()
            all_reduce(largest, tp, "max")
            sums = torch.stack([exp_sum * (local_largest - largest).exp(), target])
            exp_sum, target = reduce(sums, tp)
        log_sum_exp = exp_sum.log() + largest
        ctx.save_for_backward(logits, ids, log_sum_exp)
        ctx.first, ctx.valid, ctx.scaling, ctx.softcap, ctx.kernel = first, valid, scaling, softcap, kernel
        ctx.z_loss = z_loss
        return (log_sum_exp - target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, log_sum_exp = ctx.saved_tensors
        flat = logits.flatten(0, -2)
        flat[:, ctx.valid :] = 0.0
        if ctx.scaling != 1.0:
            grad = grad / ctx.scaling
        flat, grad = flat[:, : ctx.valid], grad.flatten()
        # The softmax of a token is weighed by grad x (1 + 2 z log-sum-exp), and its target by grad as without a z-loss.
        weight = grad if ctx.z_loss == 0.0 else grad * (1.0 + 2.0 * ctx.z_loss * log_sum_exp)
        targets = None if weight is grad else _OwnTargets.of(flat, ids, ctx.first, weight - grad, ctx.softcap)
        ctx.kernel.gradient_(flat, ids, ctx.first, log_sum_exp, weight, ctx.softcap)
        if targets is not None:
            targets.add_to(flat)
        return logits, None, None, None, None, None, None, None, None, None


@dataclass(frozen=True)
class _OwnTargets:
    """Numbers for the gradient of the targets' logits that are on this shard."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, first: int, values: Tensor, softcap: float | None) -> _OwnTargets:
        """logits [n, v] as they were capped, targets and values [n]."""
        columns, inside = local_targets(targets, first, logits.shape[1])
        rows = torch.arange(len(targets), device=logits.device)
        if logits.shape[1] and softcap is not None:
            values = values * slope(logits[rows, columns].float(), softcap)
        return cls(rows, columns, torch.where(inside, values, 0.0))

    def add_to(self, gradient: Tensor) -> None:
        """Adds to the gradient [n, v] in place; every row has one place."""
        if gradient.shape[1]:
            gradient[self.rows, self.columns] += self.values.to(gradient.dtype)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    size: int,
    tp: Group,
    scaling: float = 1.0,
    softcap: float | None = None,
    kernel: CrossEntropyKernel = separate,
    z_loss: float = 0.0,
    reduce: Reduce = all_reduce,
) -> Tensor:
    """logits [s, b, padded vocab / tp], targets [s, b] -> loss per token [s, b] of logits / scaling, capped smoothly at
    `softcap` unless that is None, in fp32.

    The softmax is over the first `size` ids of the padded vocabulary; those behind take no part and get no gradient.
    z_loss: the gradient, and not the returned loss, is also that of z_loss x logsumexp(logits)^2 of each token (PaLM,
    arXiv 2204.02311). reduce: adds up numbers over tp.
    Communication: one max and one sum all-reduce of one or two numbers per token. Forward divides and caps the logits
    in place, and backward overwrites them with their gradient, so nothing else may need them.
    """
    local = logits.shape[-1]
    first = tp.rank * local
    valid = max(0, min(local, size - first))
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits, targets, first, valid, tp, scaling, softcap, kernel, z_loss, reduce
    )
    return loss
