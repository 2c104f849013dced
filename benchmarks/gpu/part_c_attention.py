"""Part C: attention kernels against fp32, and their times, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.case import Case, Result, Setting, check, measuring
from benchmarks.gpu.measure import Timing, check_error, package, poison, random, timed
from benchmarks.gpu.record import NotRunError
from benchmarks.gpu.runs import DECODER, configured, device_of
from megatron.kernels.backends import flash3
from megatron.kernels.choose import choose_kernels
from megatron.kernels.choose_attention import Needs, candidates
from megatron.kernels.ops import attention
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, with_lengths

HEADS, GROUPS = 32, 8
CHANNELS = (64, 128)
HIDDEN = 4096  # of a product
WINDOW = 1024
# bf16 has 8 bits: rounding of the probabilities, of the output and of the gradients adds up to a few of its steps.
LIMIT = 8 * 2.0**-8
# (q [s, b, n, d], k, v [s, b, g, d], window) -> [s, b, n * d]; causal.
Kernel = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    kernels: dict[str, Callable[[Setting], AbstractContextManager[Kernel]]] = {
        "framework, auto": functools.partial(framework, False),
        "framework, auto, documents": functools.partial(framework, True),
        "FlashAttention-2": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cuDNN": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "memory-efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
        "FlashAttention-3": functools.partial(flash_3, False),
        "varlen, FlashAttention-2": varlen,
        "varlen, FlashAttention-3": functools.partial(flash_3, True),
    }
    of = functools.partial
    return [
        # Two timings for each length and head size, and kernels for each head size with and without a window.
        *(Case(name, of(measure, setting, kernel), measuring(8, compiled=4)) for name, kernel in kernels.items()),
        *(Case(f"documents, {asked}", of(documents, setting, asked)) for asked in ("auto", "flash", "unfused")),
        Case("--batch-invariant-mode", of(invariant, setting), measuring(2, compiled=8)),
    ]


def measure(setting: Setting, opened: Callable[[Setting], AbstractContextManager[Kernel]]) -> Result:
    """Compares a kernel with fp32 on short sequences, and measures it on long ones."""
    values: dict[str, Any] = {}
    words = []
    short = setting.size(1024, 32)
    with opened(setting) as kernel:
        for channels in CHANNELS:
            for window in (None, short // 4):
                name = f"d{channels}{'' if window is None else ' window'}"
                try:
                    values[f"error {name}"] = largest_error(kernel, setting, short, channels, window)
                except NotRunError as reason:
                    words.append(f"{name}: {reason}")
        errors = [value for key, value in values.items() if key.startswith("error")]
        check(bool(errors), "; ".join(words))
        words.append(f"error {max(errors):.1e}")
        lengths = (4096, 8192) if not setting.toy else (32,)
        for length in lengths:
            for channels in CHANNELS:
                forward, backward = times(kernel, setting, length, channels)
                flops = 2 * HEADS * channels * length**2  # two products, of which causal attention needs half
                rates = forward.rate(flops) / 1e12, backward.rate(2.5 * flops) / 1e12
                values[f"forward s{length} d{channels}"], values[f"backward s{length} d{channels}"] = rates
                words.append(f"s {length} d {channels}: {rates[0]:.4g} forward, {rates[1]:.4g} backward TFLOP/s")
    return Result("; ".join(words), values)


def inputs(setting: Setting, length: int, channels: int) -> list[Tensor]:
    """Returns q, k, v and a gradient of the output."""
    shapes = [(length, 1, HEADS, channels), *2 * [(length, 1, GROUPS, channels)], (length, 1, HEADS * channels)]
    made = [random(*shape, setting=setting, seed=seed) for seed, shape in enumerate(shapes)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def largest_error(kernel: Kernel, setting: Setting, length: int, channels: int, window: int | None) -> float:
    """Returns the largest relative error of the output and of the three gradients, against plain torch in fp32."""
    *data, upstream = inputs(setting, length, channels)
    scores = Scores(channels**-0.5)
    wide = [x.detach().float().requires_grad_() for x in data]
    exact = attention.unfused(*wide, scores=scores, segments=None, window=window, dropout=0.0)
    expected = [exact, *torch.autograd.grad(exact, wide, upstream.float())]
    poison(setting)
    out = kernel(*data, window)
    found = [out, *torch.autograd.grad(out, data, upstream)]
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return max(check_error(a, b, LIMIT, name) for a, b, name in zip(found, expected, names, strict=True))


def documents(setting: Setting, asked: str) -> Result:
    """Compares the kernel that a run with --attention-backend takes with fp32 on samples of several documents, some of
    one token, with and without a window."""
    s = setting.size(1024, 32)
    lengths = [[1, s // 4, 1, s // 2, s - 2 - s // 4 - s // 2], [s - 1, 1]]
    ids = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in lengths])
    segments = with_lengths(ids.to(device_of(setting)), [length for each in lengths for length in each])
    values: dict[str, Any] = {}
    for channels in CHANNELS:
        kernel, choice = chosen(setting, asked, channels, documents=True)
        for window in (None, s // 8):
            shapes = [(s, 2, HEADS, channels), *2 * [(s, 2, GROUPS, channels)], (s, 2, HEADS * channels)]
            *data, upstream = (random(*shape, setting=setting, seed=seed) for seed, shape in enumerate(shapes))
            found, exact = (
                with_gradients(each, [x.to(dtype) for x in data], upstream.to(dtype), segments, window)
                for each, dtype in ((kernel, torch.bfloat16), (attention.unfused, torch.float32))
            )
            name = f"d{channels}{'' if window is None else ' window'}"
            values[name] = max(check_error(a, b, LIMIT, name) for a, b in zip(found, exact, strict=True))
    return Result(f"{choice}: error {max(values.values()):.1e}", values)


def invariant(setting: Setting) -> Result:
    """Has set-up compare the bits of rows in other batches, and the attention of packed documents with fp32."""
    s = setting.size(1024, 32)
    run = configured(f"{DECODER} --batch-invariant-mode --attention-dropout 0 --hidden-dropout 0", setting)
    kernels = choose_kernels(run.model, device_of(setting))
    ids = torch.arange(s, device=device_of(setting)).ge(s // 3).long().unsqueeze(0)
    segments = with_lengths(ids, [s // 3, s - s // 3])
    *data, upstream = inputs(setting, s, CHANNELS[0])
    found, exact = (
        with_gradients(kernel, [x.detach().to(dtype) for x in data], upstream.to(dtype), segments, None)
        for kernel, dtype in ((kernels.attention, torch.bfloat16), (attention.unfused, torch.float32))
    )
    error = max(check_error(a, b, LIMIT, "attention") for a, b in zip(found, exact, strict=True))
    x, weight = (random(rows, HIDDEN, setting=setting, seed=rows) for rows in (setting.size(8192, 32), HIDDEN))
    taken, library = (
        timed(product, setting).ms
        for product in (lambda: kernels.linear.output(x, weight), lambda: F.linear(x, weight))
    )
    ratio = taken / library
    values = {"error": error, "product / library": ratio}
    return Result(f"{kernels.layers_choice}: error {error:.1e}, a product takes {ratio:.2f} of cuBLAS's time", values)


def with_gradients(
    kernel: AttentionKernel, data: list[Tensor], upstream: Tensor, segments: Segments, window: int | None
) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in data]
    scores = Scores(leaves[0].shape[-1] ** -0.5)
    out = kernel(*leaves, scores=scores, segments=segments, window=window, dropout=0.0)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def chosen(setting: Setting, asked: str, channels: int, *, documents: bool) -> tuple[AttentionKernel, str]:
    """Returns the attention of a run, and how the start-up table names it."""
    heads = f"--num-attention-heads {HEADS} --num-query-groups {GROUPS} --kv-channels {channels}"
    model = configured(f"{DECODER} --bf16 {heads} --attention-backend {asked}", setting).model
    kernels = choose_kernels(model, device_of(setting), documents=documents)
    return kernels.attention, kernels.attention_choice


def times(kernel: Kernel, setting: Setting, length: int, channels: int) -> tuple[Timing, Timing]:
    """Returns the times of the forward, and of the backward: both together without the forward."""
    *data, upstream = inputs(setting, length, channels)

    def both() -> None:
        torch.autograd.grad(kernel(*data, None), data, upstream)

    with torch.no_grad():
        forward = timed(lambda: kernel(*data, None), setting)
    whole = timed(both, setting)
    return forward, Timing(max(whole.ms - forward.ms, 1e-6), max(whole.spread, forward.spread))


@contextlib.contextmanager
def framework(packed: bool, setting: Setting) -> Iterator[Kernel]:
    """Yields the kernel that a run with --attention-backend auto takes. packed: one whose samples hold several
    documents."""
    kernel, choice = chosen(setting, "auto", max(CHANNELS), documents=packed)
    print(f"framework: {choice}")
    yield called(kernel, packed=packed)


def called(kernel: AttentionKernel, *, packed: bool) -> Kernel:
    """Returns a kernel of the framework as one of this part. packed: a sample is told to be one document."""

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        s, b, _, d = q.shape
        ids = torch.zeros(b, s, dtype=torch.int64, device=q.device)
        segments = with_lengths(ids, [s] * b) if packed else None
        return kernel(q, k, v, scores=Scores(d**-0.5), segments=segments, window=window, dropout=0.0)

    return attend


@contextlib.contextmanager
def sdpa(backend: SDPBackend, setting: Setting) -> Iterator[Kernel]:
    """Yields torch's SDPA with one backend and no other. It has no window, and not all take fewer key/value heads."""
    if backend != SDPBackend.FLASH_ATTENTION:
        setting.needs_cuda(backend.name)

    def kernel(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if window is not None:
            raise NotRunError("torch's SDPA has no window")
        s, b, n, d = q.shape
        if backend == SDPBackend.EFFICIENT_ATTENTION:  # it wants equally many heads
            k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != n)
        return out.permute(2, 0, 1, 3).reshape(s, b, n * d)

    yield kernel


@contextlib.contextmanager
def flash_3(packed: bool, setting: Setting) -> Iterator[Kernel]:
    """Yields FlashAttention-3's own operators. packed: that for documents of different lengths."""
    setting.needs_cuda("FlashAttention-3")
    package("flash_attn_interface")
    third = next(candidate for candidate in candidates("flash") if candidate.name == "FlashAttention-3")
    assert third.load is not None
    needs = Needs(
        device_of(setting), torch.bfloat16, max(CHANNELS), max(CHANNELS), HEADS // GROUPS, True, 0.0, None, packed
    )
    reason = third.missing(needs) or third.load(needs)
    if reason is not None:
        raise NotRunError(reason)
    yield called(flash3.attention(attention.fused), packed=packed)


@contextlib.contextmanager
def varlen(setting: Setting) -> Iterator[Kernel]:
    """Yields torch's attention over packed documents, here one document."""
    setting.needs_cuda("torch.nn.attention.varlen")
    varlen_attn = package("torch.nn.attention.varlen").varlen_attn
    takes = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        s, b, n, d = q.shape
        if "window_size" in takes:
            sides = {"window_size": (-1 if window is None else window - 1, 0)}
        elif window is None:
            sides = {"is_causal": True}
        else:
            raise NotRunError(f"varlen_attn of torch {torch.__version__} has no window")
        ends = torch.tensor([0, s], dtype=torch.int32, device=q.device)
        flat = (x.reshape(s, x.shape[2], d) for x in (q, k, v))
        return varlen_attn(*flat, ends, ends, s, s, **sides, **options).reshape(s, b, n * d)

    yield kernel
