"""Cross entropy over logits whose vocabulary is sharded over tp: no rank ever holds the full row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group
from megatron.kernels.ops.cross_entropy import CrossEntropyKernel, separate
from megatron.kernels.ops.softcap import softcap_


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
    ) -> Tensor:
        # Contiguous, because backward writes the gradient through a flat view: of a copy it would be lost. Detached, because
        # with --tp-comm-overlap the linear layer returns a view, and autograd saves none that was changed.
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
            exp_sum, target = all_reduce(sums, tp)
        log_sum_exp = exp_sum.log() + largest
        ctx.save_for_backward(logits, ids, log_sum_exp)
        ctx.first, ctx.valid, ctx.scaling, ctx.softcap, ctx.kernel = first, valid, scaling, softcap, kernel
        return (log_sum_exp - target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None, None, None]:
        logits, ids, log_sum_exp = ctx.saved_tensors
        flat = logits.flatten(0, -2)
        flat[:, ctx.valid :] = 0.0
        if ctx.scaling != 1.0:
            grad = grad / ctx.scaling
        ctx.kernel.gradient_(flat[:, : ctx.valid], ids, ctx.first, log_sum_exp, grad.flatten(), ctx.softcap)
        return logits, None, None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    size: int,
    tp: Group,
    scaling: float = 1.0,
    softcap: float | None = None,
    kernel: CrossEntropyKernel = separate,
) -> Tensor:
    """logits [s, b, padded vocab / tp], targets [s, b] -> loss per token [s, b] of logits / scaling, capped smoothly at
    `softcap` unless that is None, in fp32.

    The softmax is over the first `size` ids of the padded vocabulary; those behind take no part and get no gradient.
    Communication: one max and one sum all-reduce of one or two numbers per token. Forward divides and caps the logits in
    place, and backward overwrites them with their gradient, so nothing else may need them.
    """
    local = logits.shape[-1]
    first = tp.rank * local
    valid = max(0, min(local, size - first))
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, first, valid, tp, scaling, softcap, kernel)
    return loss
