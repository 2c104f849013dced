"""FlashAttention-3 on Hopper, by its own operators: `torch.ops.flash_attn_3`, which `flash_attn_interface` registers.

Shah et al., arXiv 2407.08608. The operators take [b, s, heads, d], or the tokens of all documents [tokens, heads, d],
with any strides but that of the channels. So tensors are passed as views of [s, b, heads, d], and the output and the
gradients are written into such views. The log-sum-exp is [b, n, s] or [n, tokens], in fp32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.base.errors import first_line
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, in_order

LARGEST_HEAD = 256
MODULE = "flash_attn_interface"  # that registers the operators


def missing(device: torch.device, dtype: torch.dtype, channels: Sequence[int], dropout: float) -> str | None:
    """As `unfit`, and registers the operators."""
    return unfit(device, dtype, channels, dropout) or load()


def unfit(device: torch.device, dtype: torch.dtype, channels: Sequence[int], dropout: float) -> str | None:
    """Returns the reason why the operators cannot run here, or None if it takes their library to know. Loads nothing.

    `channels`: of a query's head, and of a value's.
    """
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {str(dtype).removeprefix('torch.')}, it needs bf16 or fp16"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the GPU is sm_{major}{minor}, it needs sm_90"
    for head in channels:
        if head % 8 or head > LARGEST_HEAD:
            return f"the head size is {head}, it needs a multiple of 8 up to {LARGEST_HEAD}"
    if dropout > 0.0:
        return f"it has no dropout, and --attention-dropout is {dropout:g}"
    return None if importlib.util.find_spec(MODULE) is not None else f"{MODULE} is not installed"


def load() -> str | None:
    """Imports the package. Returns the reason if its operators are not there afterwards."""
    try:
        importlib.import_module(MODULE)
        _ = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
    except Exception as error:  # it is built for another torch or another CUDA, or is something else
        return f"{MODULE} cannot be loaded: {first_line(error)}"
    return None


class Flash3Call(NamedTuple):
    """The arguments that a forward and its backward share. See `Rule` for the visible keys.

    left, right: keys that a query sees beside its own, counted from the ends of queries and keys; -1 is no limit.
    documents: attention stays inside them, and the tensors hold the tokens of all; None: of one sequence per sample.
    """

    scores: Scores
    causal: bool
    left: int = -1
    right: int = -1
    documents: Segments | None = None

    @staticmethod
    def of(rule: Rule, s: int, t: int) -> Flash3Call:
        """Returns the call for s queries and t keys. The rule is `in_reach` and has no segments and no dropout."""
        if rule.offset is None:
            return Flash3Call(rule.scores, causal=False)
        left, right = rule.reach(s, t)
        if left is None and right == 0:
            return Flash3Call(rule.scores, causal=True)
        return Flash3Call(rule.scores, causal=False, left=-1 if left is None else left, right=right)

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments that forward and backward have in common."""
        starts, longest = None, None
        if self.documents is not None:
            starts, longest = self.documents.starts, max(self.documents.lengths)
        return {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "softmax_scale": self.scores.scale,
            "is_causal": self.causal,
            "window_size_left": self.left,
            "window_size_right": self.right,
            "softcap": self.scores.softcap or 0.0,
            # Multiprocessors that torch's own matrix products leave to communication, too.
            "sm_margin": torch._C._get_sm_carveout_experimental() or 0,
        }


def _forward(call: Flash3Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Writes the attention of the operator's layout into `out`, and returns its log-sum-exp."""
    # More than one split of the keys is for queries of few tokens, and changes the order of sums.
    _, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, out=out, num_splits=1, **call.keywords())
    log_sum_exp: Tensor = lse
    return log_sum_exp


def _backward(
    call: Flash3Call,
    lse: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes the gradients of q, k and v into dq, dk and dv."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.ops.flash_attn_3.bwd(
        grad, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, deterministic=deterministic, **call.keywords()
    )


def _views(call: Flash3Call, *tensors: Tensor) -> list[Tensor]:
    """Returns [s, b, heads, d] in the operator's order; the tokens of documents are in it."""
    return [x.transpose(0, 1) for x in tensors] if call.documents is None else list(tensors)


def _empty(x: Tensor) -> Tensor:
    """Contiguous memory of x's shape."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _output(q: Tensor, v: Tensor) -> Tensor:
    """Contiguous memory for the output: as many heads as queries, each with the channels of a value."""
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)


class _Attend(torch.autograd.Function):
    """q [s, b, n, d]; k [t, b, g, d]; v [t, b, g, v] -> [s, b, n, v]; with documents [tokens, heads, channels] each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Flash3Call) -> Tensor:
        out = _output(q, v)
        lse = _forward(call, *_views(call, q, k, v, out))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _empty(q), _empty(k), _empty(v)
        _backward(ctx.call, lse, *_views(ctx.call, grad.contiguous(), q, k, v, out, dq, dk, dv))
        return dq, dk, dv, None


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns an AttentionKernel, which calls `otherwise` for documents that are known by their ids alone.

    The tokens of documents are read where they are with one sample, and from copies with several.
    """

    def flash3(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        if segments is not None and (segments.starts is None or len(q) != len(k)):
            return otherwise(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        assert dropout == 0.0, "set-up takes no FlashAttention-3 for a model with attention dropout"
        (s, b, *_), t = q.shape, len(k)
        longest = t if segments is None else max(segments.lengths)
        seen = None if window is None or window >= longest else window
        call = Flash3Call.of(Rule(scores, t - s, seen), s, t)
        if segments is None:
            out: Tensor = _Attend.apply(q, k, v, call)
            return out.flatten(2)
        out = _Attend.apply(*in_order(q, k, v), call._replace(documents=segments))
        return out.view(b, s, -1).transpose(0, 1)

    return flash3


def block_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `attention_lse.Forward`."""
    out, call = _output(q, v), Flash3Call.of(rule, len(q), len(k))
    return out, _forward(call, *_views(call, q, k, v, out))


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_lse.Backward`."""
    call, into = Flash3Call.of(rule, len(q), len(k)), (_empty(q), _empty(k), _empty(v))
    _backward(call, lse.contiguous(), *_views(call, grad, q, k, v, out, *into))
    return into
