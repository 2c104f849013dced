"""Attention of a block with its log-sum-exp through torch's flash attention for CPUs, called below autograd.

Shapes and meaning are those of `attention_lse`: q [s, b, n, d]; k, v [t, b, g, d]; lse [b, n, s].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.ops.attention_rule import Rule, forget_blind


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """torch's flash attention for CPUs. It takes grouped heads directly, and masks as additive tensors of q's dtype."""
    mask = None if rule.square(q.shape[0], k.shape[0]) else rule.mask(q.shape[0], k.shape[0], q.device)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q, k, v),
        0.0,
        rule.square(q.shape[0], k.shape[0]),
        attn_mask=_additive(mask, q.dtype),
        scale=rule.scores.uncapped_scale,
    )
    return forget_blind(out.permute(2, 0, 1, 3), lse, mask)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the same operator: it uses the given log-sum-exp, here the merged one."""
    square = rule.square(q.shape[0], k.shape[0])
    mask = None if square else _additive(rule.mask(q.shape[0], k.shape[0], q.device), q.dtype)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad, q, k, v, out),
        lse,
        0.0,
        square,
        attn_mask=mask,
        scale=rule.scores.uncapped_scale,
    )
    dq, dk, dv = (x.permute(2, 0, 1, 3) for x in gradients)
    return dq, dk, dv


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in tensors]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
