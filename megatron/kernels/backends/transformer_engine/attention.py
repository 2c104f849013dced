"""Transformer Engine's fused attention, which is cuDNN's: the functions below its DotProductAttention.

Samples of one document are [s, b, heads, d] ("sbhd"). The documents of packed samples lie one behind the other as
[tokens, heads, d] ("thd"), with the first token of each in cu_seqlens. The functions read memory by these layouts and
ignore strides, so tensors are contiguous. Dropout draws from the current generator of the device, and backward gets its
state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformer_engine.pytorch import cpp_extensions as engine
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    AttnBiasType,
    AttnMaskType,
    FusedAttnBackend,
    QKVLayout,
    SoftmaxType,
)

from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, in_order

_BIAS, _SOFTMAX = "no_bias", "vanilla"
_LENGTHS = 64  # the longest document is rounded up to a multiple, so that fewer graphs are built


class EngineCall(NamedTuple):
    """The arguments that a forward and its backward share.

    layout: of each of q, k and v. starts: cu_seqlens, int32 [sequences + 1]. longest: tokens of a sequence, at most.
    """

    layout: str
    mask: str
    starts: Tensor
    longest: int
    scale: float
    window: tuple[int, int]
    dropout: float

    @staticmethod
    def of(q: Tensor, scores: Scores, segments: Segments | None, window: int | None, dropout: float) -> EngineCall:
        """Returns the call for q [s, b, n, d] and as many keys."""
        s, b = q.shape[:2]
        if segments is None:
            layout, mask, longest = "sbhd", "causal", s
            starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
        else:
            assert segments.starts is not None
            layout, mask, longest, starts = "thd", "padding_causal", max(segments.lengths), segments.starts
        left = -1 if window is None or window >= longest else window - 1
        padded = longest if segments is None else -(-longest // _LENGTHS) * _LENGTHS
        return EngineCall(layout, mask, starts, padded, scores.uncapped_scale, (left, 0), dropout)

    @property
    def layouts(self) -> str:
        """Returns the layouts of q, k and v in one word."""
        return "_".join([self.layout] * 3)

    def keywords(self, q: Tensor) -> dict[str, Any]:
        """Returns the named arguments that forward and backward have in common."""
        padded = self.starts if self.layout == "thd" else None  # no padding between documents
        return {
            "cu_seqlens_q_padded": padded,
            "cu_seqlens_kv_padded": padded,
            "attn_scale": self.scale,
            "dropout": self.dropout,
            "qkv_layout": self.layouts,
            "attn_bias_type": _BIAS,
            "attn_mask_type": self.mask,
            "softmax_type": _SOFTMAX,
            "window_size": self.window,
            "cuda_graph": _captured(q),
        }

    def backend(self, q: Tensor, k: Tensor) -> Any:
        """Returns the kernel that computes this in training, or None if there is none."""
        dtype, (n, d), g = TE_DType[q.dtype], q.shape[-2:], k.shape[-2]
        training, largest_logit = True, False
        backend = engine.get_fused_attn_backend(
            training, dtype, dtype, QKVLayout[self.layouts], AttnBiasType[_BIAS], AttnMaskType[self.mask],
            SoftmaxType[_SOFTMAX], self.dropout, n, g, self.longest, self.longest, d, d, *self.window,
            largest_logit, _captured(q), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        if backend == FusedAttnBackend["No_Backend"]:
            return None
        # As DotProductAttention decides: the kernel for up to 512 tokens has no windows.
        if self.window[0] >= 0 and backend != FusedAttnBackend["F16_arbitrary_seqlen"]:
            return None
        return backend


class _Attend(torch.autograd.Function):
    """q [s, b, n, d]; k, v [s, b, g, d] -> [s, b, n, d]; with documents [tokens, heads, d] each. All contiguous."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: EngineCall, backend: Any) -> Tensor:
        # Also where no gradient is needed: a layer that is recomputed then gets the same bits, and dropout.
        training, starts = True, call.starts
        out, context, *_ = engine.fused_attn_fwd(
            training, call.longest, call.longest, starts, starts, q, k, v, q.dtype, backend, **call.keywords(q)
        )
        ctx.save_for_backward(q, k, v, out, *context)
        ctx.call, ctx.backend = call, backend
        result: Tensor = out
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: EngineCall = ctx.call
        q, k, v, out, *context = ctx.saved_tensors
        starts, dtype = call.starts, q.dtype
        dq, dk, dv, *_ = engine.fused_attn_bwd(
            call.longest, call.longest, starts, starts, q, k, v, out, grad.contiguous(), dtype, TE_DType[dtype],
            list(context), ctx.backend, deterministic=torch.are_deterministic_algorithms_enabled(), **call.keywords(q),
        )  # fmt: skip
        return dq, dk, dv, None, None


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns an AttentionKernel, which calls `otherwise` where there is no fused kernel.

    That is so for documents that are known by their ids alone, and for queries that continue a cache.
    """

    def fused_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        if len(q) == len(k) and (segments is None or segments.starts is not None):
            call = EngineCall.of(q, scores, segments, window, dropout)
            backend = call.backend(q, k)
            if backend is not None:
                return _attend(q, k, v, call, backend, segments)
        return otherwise(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

    return fused_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, call: EngineCall, backend: Any, segments: Segments | None) -> Tensor:
    s, b = q.shape[:2]
    tensors = [q, k, v] if segments is None else in_order(q, k, v)
    out: Tensor = _Attend.apply(*(x.contiguous() for x in tensors), call, backend)
    return out.flatten(2) if segments is None else out.view(b, s, -1).transpose(0, 1)


def _captured(x: Tensor) -> bool:
    """Whether this becomes a part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def no_kernel(*args: Tensor, **options: Any) -> Tensor:
    """For a trial of `attention`: raises RuntimeError."""
    raise RuntimeError("its fused attention has no kernel for this model on this GPU")
