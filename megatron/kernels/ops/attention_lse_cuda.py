"""Attention of a block with its log-sum-exp through torch's CUDA kernels, called below autograd.

Shapes and meaning are those of `attention_lse`: q [s, b, n, d]; k, v [t, b, g, d]; lse [b, n, s].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.backends.flash import by_operator
from megatron.kernels.ops.attention_rule import Rule, forget_blind

_VECTOR_BYTES = 16  # the memory-efficient kernel reads heads and masks in vectors of this size
_LSE_ROWS = 32  # and pads the log-sum-exp to a multiple of this


def flash_takes(q: Tensor, k: Tensor, rule: Rule) -> bool:
    """Returns whether FlashAttention supports this block."""
    return rule.segments is None and by_operator(q.shape[-1]) and rule.in_reach(len(q), len(k))


def _window(rule: Rule, s: int, t: int) -> tuple[bool, dict[str, int]]:
    """Returns (causal, window arguments) for FlashAttention."""
    if rule.offset is None:
        return False, {}
    left, right = rule.reach(s, t)
    if left is None and right == 0:
        return True, {}
    return False, {"window_size_left": -1 if left is None else left, "window_size_right": right}


def flash_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """FlashAttention-2. It takes grouped heads and any strides."""
    s, t = q.shape[0], k.shape[0]
    causal, window = _window(rule, s, t)
    no_packing, no_dropout, debug = (None, None), 0.0, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_batch_first(q, k, v), *no_packing, s, t, no_dropout, causal, debug, scale=rule.scores.uncapped_scale, **window
    )
    return out.transpose(0, 1), lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `flash_forward`, from the merged output and log-sum-exp."""
    s, t = q.shape[0], k.shape[0]
    causal, window = _window(rule, s, t)
    no_packing, no_dropout = (None, None), 0.0
    # These are read only with dropout.
    seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
    gradients = torch.ops.aten._flash_attention_backward(
        *_batch_first(grad, q, k, v, out),
        lse.contiguous(),
        *no_packing,
        s,
        t,
        no_dropout,
        causal,
        seed,
        offset,
        scale=rule.scores.uncapped_scale,
        **window,
    )
    dq, dk, dv = (x.transpose(0, 1) for x in gradients)
    return dq, dk, dv


def _batch_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1) for x in tensors]


def efficient_takes(q: Tensor, v: Tensor) -> bool:
    """Returns whether the memory-efficient kernel supports blocks of these head sizes."""
    return all(x.shape[-1] * x.element_size() % _VECTOR_BYTES == 0 for x in (q, v))


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention: fp32 and half precision, with masks. It needs a key head per query head."""
    s, n = q.shape[0], q.shape[2]
    mask = None if rule.square(s, k.shape[0]) else rule.mask(s, k.shape[0], q.device)
    with_lse, no_dropout = True, 0.0
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *_heads_first(q, _repeated(k, n), _repeated(v, n)),
        _bias(mask, q),
        with_lse,
        no_dropout,
        rule.square(s, k.shape[0]),
        scale=rule.scores.uncapped_scale,
    )
    return forget_blind(out.permute(2, 0, 1, 3), lse[..., :s], mask)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `efficient_forward`, from the merged output and log-sum-exp; repeated heads are summed in
    fp32."""
    s, n = q.shape[0], q.shape[2]
    square = rule.square(s, k.shape[0])
    mask = None if square else rule.mask(s, k.shape[0], q.device)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))  # read only with dropout
    wanted, no_dropout = [True, True, True, False], 0.0
    heads = _heads_first(grad, q, _repeated(k, n), _repeated(v, n))
    padded = F.pad(lse, (0, -s % _LSE_ROWS), value=float("inf")).contiguous()
    # The kernel takes any strides, but the tokens of the output must be contiguous within a sample.
    solid = out.transpose(0, 1).contiguous().transpose(1, 2)
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *heads,
        _bias(mask, q),
        solid,
        padded,
        seed,
        offset,
        no_dropout,
        wanted,
        square,
        scale=rule.scores.uncapped_scale,
    )
    dq, dk, dv = (x.permute(2, 0, 1, 3) for x in gradients[:3])
    return dq, _summed(dk, k.shape[2]), _summed(dv, k.shape[2])


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in tensors]


def _repeated(x: Tensor, n: int) -> Tensor:
    """[t, b, g, d] -> [t, b, n, d]."""
    return x if x.shape[2] == n else x.repeat_interleave(n // x.shape[2], dim=2)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """[t, b, n, d] -> [t, b, g, d] in fp32."""
    if grad.shape[2] == groups:
        return grad
    return grad.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns 0 where visible and -inf elsewhere, [b, n, s, t] by strides, with rows aligned to whole vectors."""
    if mask is None:
        return None
    _, b, n, _ = q.shape
    t = mask.shape[-1]
    rows = torch.empty((*mask.shape[:-1], t + -t % _VECTOR_BYTES), dtype=q.dtype, device=q.device)
    bias = rows[..., :t].zero_().masked_fill_(~mask, float("-inf"))
    return bias.expand(b, n, *bias.shape[-2:])
