"""Sinks of attention: a score per head that takes part in the softmax of each of its queries, and has no value.

So a head may attend to nothing (gpt-oss, arXiv 2508.10925; the idea is that of Xiao et al., arXiv 2309.17453). A sink
only adds exp(sink) to the sum over keys. So attention is computed without it, by any kernel that returns its
log-sum-exp L, and then multiplied by exp(L) / (exp(L) + exp(sink)). The kernel's backward takes the output and the
log-sum-exp with the sink: the gradient of a score is P (dP - sum P dP) as before, because the sink's dP is 0. That of
the sink is the sum over queries of -P_sink (dO . O).
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks [n] to the softmax whose results are `out` [s, b, n, v] and `lse` [b, n, s], both fp32 or wider, in
    place. A query without keys, of which `out` is 0 and `lse` -inf, attends to its sink alone.

    Made of exp and log, which give an element the same bits at every place of a tensor.
    """
    scores = sinks.to(lse.dtype).unsqueeze(1)
    highest = torch.maximum(lse, scores)
    total = ((lse - highest).exp_() + (scores - highest).exp_()).log_().add_(highest)
    out.mul_((lse - total).exp_().permute(2, 0, 1).unsqueeze(-1))
    lse.copy_(total)


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of sinks [n], from that of the output, grad [s, b, n, v], and from the results of
    `add_sinks_`; `out` may have been rounded."""
    along = (grad.to(torch.promote_types(grad.dtype, torch.float32)) * out).sum(-1).permute(1, 2, 0)  # [b, n, s]
    share = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp_()
    return -(share * along).sum((0, 2)).to(sinks.dtype)
