"""Rotary position embedding: frequencies with every common scaling, tables, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.spec.attention import Llama3Scaling, QueryScaling, RotarySpec, YarnScaling

Rotation = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # see `rotate_once`


class SplitRotation(NamedTuple):
    """Split and rotation without autograd: functions with the contracts of those of this file."""

    split: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    join: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


def rotary_frequencies(spec: RotarySpec, device: torch.device, *, long: bool = False) -> tuple[Tensor, float]:
    """Returns (inverse frequencies [channels / 2] fp32, factor on cos and sin) of a rotary embedding.

    `long`: those of LongRoPE for sequences above its original length. Only `dynamic_frequencies` depend on the length,
    too.

    Su et al., arXiv 2104.09864; linear scaling: Chen et al., arXiv 2306.15595; YaRN: Peng et al., arXiv 2309.00071;
    LongRoPE: Ding et al., arXiv 2402.13753; the Llama-3.1 rule as in the published model's config.json (rope_type
    "llama3").
    """
    exponent = torch.arange(0, spec.channels, 2, dtype=torch.int64, device=device).float() / spec.channels
    if spec.longrope is not None:
        factors = torch.tensor(spec.longrope.long if long else spec.longrope.short, dtype=torch.float32, device=device)
        return 1.0 / (factors * spec.base**exponent), spec.longrope.magnitude
    frequencies = 1.0 / (spec.base**exponent)
    if spec.interpolation:
        frequencies = frequencies / spec.interpolation
    if spec.llama3 is not None:
        frequencies = _llama3_scaling(frequencies, spec.llama3)
    if spec.yarn is not None:
        return _yarn_scaling(frequencies, spec, spec.yarn), spec.yarn.magnitude
    return frequencies, 1.0


def dynamic_frequencies(spec: RotarySpec, lengths: Tensor) -> Tensor:
    """Returns the inverse frequencies [..., channels / 2] of sequences that are longer than the context of dynamic NTK
    scaling, whose numbers of tokens are `lengths` [..., 1]."""
    assert spec.dynamic is not None
    factor, channels = spec.dynamic.factor, spec.channels
    exponent = torch.arange(0, channels, 2, dtype=torch.int64, device=lengths.device).float() / channels
    stretch = factor * lengths / spec.dynamic.context - (factor - 1)
    return 1.0 / ((spec.base * stretch ** (channels / (channels - 2))) ** exponent)


def _llama3_scaling(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original * frequencies / (2 * math.pi)  # rotations over the original context
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn_scaling(frequencies: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    original, dim = scaling.original, spec.channels

    def dimension_of(turns: float) -> float:  # the (fractional) index of the frequency that makes this many turns
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.rounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    # The edges may be swapped if both lie beyond all frequencies; the published rule only handles equal ones.
    stretch = ((index - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretch) + frequencies / scaling.factor * stretch


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [s, b or 1, 1, rotary_dim / 2] for positions [b or 1, s], in the activation dtype.

    `frequencies` are [rotary_dim / 2], or [b, rotary_dim / 2] if sequences differ in them.
    """
    angles = positions.t().float().unsqueeze(-1) * frequencies  # [s, b, rotary_dim / 2]
    angles = angles.unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def query_scales(positions: Tensor, scaling: QueryScaling, dtype: torch.dtype) -> Tensor:
    """Returns the factors [s, b or 1, 1, 1] on the queries of positions [b or 1, s], in the activation dtype."""
    contexts = torch.floor(positions.t() / scaling.original)
    return (1.0 + scaling.beta * torch.log(1.0 + contexts)).to(dtype)[..., None, None]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, once: Rotation) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.once = interleaved, once
        return once(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation is the inverse rotation
        return ctx.once(grad, cos, -sin, ctx.interleaved), None, None, None, None


def rotate_once(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns `rotate` of x without autograd, contiguous."""
    half = cos.shape[-1]
    firsts = slice(0, 2 * half, 2) if interleaved else slice(half)
    seconds = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    first, second = x[..., firsts], x[..., seconds]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Each multiplication rounds separately, as in Hugging Face's x * cos + rotate_half(x) * sin.
    torch.mul(first, cos, out=out[..., firsts]).sub_(second * sin)
    torch.mul(second, cos, out=out[..., seconds]).add_(first * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, once: Rotation = rotate_once) -> Tensor:
    """Rotates the first 2 x (size of the tables) channels of x [s, b, heads, d].

    Channel i is paired with i + half, or if `interleaved` 2 i with its neighbour 2 i + 1. once: the kernel.
    """
    result: Tensor = _Rotate.apply(x, cos, sin, interleaved, once)
    return result


def split(qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated q [s, b, g * n, d] and k [s, b, g, d], and v [s, b, g, d], contiguous, of qkv [s, b, g, n + 2,
    d].

    A group has n heads of queries, one of keys and one of values. cos, sin: as in `rotate`.
    """
    q = rotate_once(qkv[:, :, :, :-2].flatten(2, 3), cos, sin, interleaved)
    return q, rotate_once(qkv[:, :, :, -2], cos, sin, interleaved), qkv[:, :, :, -1].contiguous()


def join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns the gradient of qkv from those of the results of `split`."""
    s, b, groups, d = k.shape
    q = rotate_once(q, cos, -sin, interleaved).view(s, b, groups, -1, d)
    return torch.cat((q, rotate_once(k, cos, -sin, interleaved).unsqueeze(3), v.unsqueeze(3)), dim=3)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kernel: SplitRotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernel = interleaved, kernel
        return kernel.split(qkv, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.kernel.join(*grads, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, kernel: SplitRotation
) -> tuple[Tensor, Tensor, Tensor]:
    """`split` under autograd. It keeps only the tables for backward."""
    result: tuple[Tensor, Tensor, Tensor] = _Split.apply(qkv, cos, sin, interleaved, kernel)
    return result
