"""Chooses the attention kernel of a run: of the candidates that --attention-backend allows, the first that can run.

A candidate cannot run for a reason that is known beforehand, or because its trial fails: which head sizes, windows and
rates of dropout a build supports on a GPU is known for certain only then. A library from outside is tried in a process
of its own first. `auto` falls back to the next candidate. A backend that is asked for by name runs on a GPU, or the run
stops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.nn.attention import SDPBackend

from megatron.base.errors import ConfigError
from megatron.kernels.backends import flash, flash3
from megatron.kernels.child_trial import failure_in_child
from megatron.kernels.fused import failure_of, only_traced
from megatron.kernels.ops import attention, attention_lse, attention_rows
from megatron.kernels.ops.attention import (
    AttentionKernel,
    fused,
    fused_by,
    in_fp32,
    with_equal_channels,
    with_equal_heads,
)
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_packed import packed
from megatron.kernels.ops.attention_trial import try_attention, try_blocks
from megatron.kernels.ops.gemm import slow_half
from megatron.kernels.transformer_engine import Engine
from megatron.spec.attention import CoreSpec

AUTO, FLASH, FUSED, UNFUSED = "auto", "flash", "fused", "unfused"
_CUDNN, _EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_MATH = "math"  # plain torch, some queries at a time: that of torch's SDPA computes all probabilities at once
# torch's SDPA, one document after the other. Its kernel for CPUs takes heads of one size.
fused_on_cpu = with_equal_channels(packed(fused, by_flash=False, grouped=True))
# By autograd it would keep a matrix of each layer that masks what is outside of the window.
windowed_on_cpu = packed(attention_rows.of_blocks(attention_lse.cpu), by_flash=False, grouped=True)
Kernel = TypeVar("Kernel")
_OTHERS = (SDPBackend.FLASH_ATTENTION, _EFFICIENT, SDPBackend.MATH)


@dataclass(frozen=True)
class Needs:
    """Attention of a run on a GPU. qk_dim: channels of a query's and a key's head; v_dim: those of a value's; queries:
    query heads per key head; windowed: in some layers; documents: samples hold several, to which the kernel should
    attend in one call; sinks: of the softmax."""

    device: torch.device
    dtype: torch.dtype
    qk_dim: int
    v_dim: int
    queries: int
    windowed: bool
    dropout: float
    softcap: float | None
    documents: bool
    sinks: bool = False


@dataclass(frozen=True)
class AttentionCandidate(Generic[Kernel]):
    """A kernel that may be chosen. missing: returns the reason why it cannot run, if that is known without a trial.

    tried: what the trial calls, where `kernel` leaves some calls to others. load: loads the library of a kernel from
    outside for the trial, or returns the reason why it cannot be used.
    """

    name: str
    missing: Callable[[Needs], str | None]
    kernel: Kernel
    tried: Kernel
    load: Callable[[Needs], str | None] | None = None


@dataclass(frozen=True)
class Chosen:
    """Kernels for whole sequences and for blocks, each with "kernel (reason)" for the start-up table."""

    attention: AttentionKernel
    attention_choice: str
    blocks: BlockKernel
    block_choice: str


def choose_attention(
    cores: Sequence[CoreSpec],
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    blocks: bool,
    documents: bool,
    engine: Engine | None = None,
) -> Chosen:
    """Returns the kernels for `--attention-backend backend`. All compute the same function.

    cores: attention of the layers, which differ in their windows alone. blocks: whether attention runs in blocks; else
    their kernels are not tried. documents: see `Needs`. engine: Transformer Engine, if it was asked for; its kernel is
    tried before ours. Raises ConfigError if a backend that is asked for by name cannot run.
    """
    needs = needs_of(cores, dtype, device, documents=documents)
    if backend == UNFUSED:
        return Chosen(
            attention.unfused,
            "unfused (plain torch, asked for)",
            attention_lse.with_dropout(attention_lse.reference) if needs.dropout else attention_lse.reference,
            "unfused blocks (plain torch in fp32, asked for)",
        )
    if device.type != "cuda":
        chosen = _on_cpu(backend, needs)
        return _with_sinks(chosen.blocks, chosen.block_choice) if needs.sinks else chosen
    if needs.sinks:
        if backend == FUSED:
            raise _refusal(backend, ["cuDNN: torch's has no --softmax-type"])
        return _with_sinks(*_with_dropout(*_of_blocks(backend, needs, needed=True), needs))
    kernel, choice = _of_sequences(backend, needs, _of_engine(backend, engine))
    return Chosen(kernel, choice, *_with_dropout(*_of_blocks(backend, needs, needed=blocks), needs))


def _with_sinks(blocks: BlockKernel, choice: str) -> Chosen:
    """Returns the kernels of attention with sinks. That of whole sequences is the one of blocks, because sinks need its
    log-sum-exp, and it attends to one document after the other: see attention_sinks.py."""
    kernel = packed(attention_rows.of_blocks(blocks), by_flash=False, grouped=True)
    name, _, why = choice.partition(" (")
    reasons = [why.removesuffix(")")] if why else []
    return Chosen(kernel, _choice(name, [*reasons, "a sequence is one block, for --softmax-type"]), blocks, choice)


def needs_of(cores: Sequence[CoreSpec], dtype: torch.dtype, device: torch.device, *, documents: bool) -> Needs:
    """Returns the needs of the layers' attention."""
    core = cores[0]
    assert {dataclasses.replace(other, window=core.window) for other in cores} == {core}, cores
    return Needs(
        device=device,
        dtype=dtype,
        qk_dim=core.qk_dim,
        v_dim=core.v_dim,
        queries=core.heads // core.groups,
        windowed=any(other.window is not None for other in cores),
        dropout=core.dropout,
        softcap=core.softcap,
        documents=documents,
        sinks=core.has_sinks,
    )


def _on_cpu(backend: str, needs: Needs) -> Chosen:
    """A kernel of GPUs that is asked for by name ends no run here: so the command line of a cluster runs on a
    laptop."""
    reasons = [] if backend == AUTO else [f"{backend} is for GPUs"]
    if needs.softcap is not None:
        rows = "unfused blocks (plain torch in fp32: no fused kernel here caps scores)"
        return Chosen(
            attention_rows.attention,
            _choice(_MATH, [*reasons, "torch's SDPA caps no scores"]),
            *_with_dropout(attention_lse.by_rows, rows, needs),
        )
    flash_for_cpus = "fused blocks (torch's flash for CPUs)"
    # torch's kernel for CPUs has no dropout. Plain torch in its place keeps all probabilities of a sample anyway.
    kernel = fused if needs.dropout else windowed_on_cpu if needs.windowed else fused_on_cpu
    if slow_half(needs.device, needs.dtype):
        name = str(needs.dtype).removeprefix("torch.")
        choice = _choice("torch SDPA", [*reasons, f"in fp32: this CPU has no {name} products"])
        flash_for_cpus = f"fused blocks (torch's flash for CPUs in fp32, this one has no {name} products)"
        blocks = attention_lse.in_fp32(attention_lse.cpu)
        return Chosen(in_fp32(kernel), choice, *_with_dropout(blocks, flash_for_cpus, needs))
    return Chosen(kernel, _choice("torch SDPA", reasons), *_with_dropout(attention_lse.cpu, flash_for_cpus, needs))


def _of_engine(backend: str, engine: Engine | None) -> list[AttentionCandidate[AttentionKernel]]:
    """Its kernel is cuDNN's: FlashAttention is asked for by its own name."""
    if engine is None or backend in (FLASH, UNFUSED):
        return []
    return [
        AttentionCandidate("Transformer Engine's cuDNN", _no_engine, engine.attention, engine.attention_alone),
    ]


def try_engine_attention(backend: str, needs: Needs, engine: Engine) -> None:
    """Tries Transformer Engine's attention where set-up does, whatever comes of it."""
    _first(_of_engine(backend, engine), needs, partial(_try_sequences, needs))


def _of_sequences(
    backend: str, needs: Needs, of_engine: Sequence[AttentionCandidate[AttentionKernel]]
) -> tuple[AttentionKernel, str]:
    candidate, reasons = _first([*of_engine, *candidates(backend)], needs, partial(_try_sequences, needs))
    if candidate is not None:
        return candidate.kernel, _choice(candidate.name, reasons)
    if backend != AUTO:
        raise _refusal(backend, reasons)
    return attention_rows.attention, _choice(_MATH, reasons)


def _of_blocks(backend: str, needs: Needs, *, needed: bool) -> tuple[BlockKernel, str]:
    """Dropout and documents are no needs of blocks: see [Note: dropout in blocks], and
    core/context_parallel/blocks.py."""
    needs = dataclasses.replace(needs, dropout=0.0, documents=False)
    candidate, reasons = _first(block_candidates(backend), needs, partial(_try_blocks, needs) if needed else None)
    if candidate is not None:
        return candidate.kernel, _choice(f"{candidate.name} blocks", reasons)
    if backend == FLASH and needed:
        raise _refusal(backend, reasons)
    return attention_lse.by_rows, _choice("unfused blocks", ["plain torch in fp32", *reasons])


def _first(
    candidates: Sequence[AttentionCandidate[Kernel]], needs: Needs, trial: Callable[[Kernel], None] | None
) -> tuple[AttentionCandidate[Kernel] | None, list[str]]:
    """Returns the first candidate that can run, and the reasons why those before it cannot. None: no trial."""
    reasons = list[str]()
    for candidate in candidates:
        reason = candidate.missing(needs)
        if reason is None and trial is not None:
            reason = None if candidate.load is None else candidate.load(needs)
            reason = reason or failure_of(partial(trial, candidate.tried))
        if reason is None:
            return candidate, reasons
        reasons.append(f"{candidate.name}: {reason}")
    return None, reasons


def _try_sequences(needs: Needs, kernel: AttentionKernel) -> None:
    """Raises RuntimeError if a kernel for whole sequences does not do what is needed."""
    try_attention(
        kernel,
        needs.device,
        needs.dtype,
        qk_dim=needs.qk_dim,
        v_dim=needs.v_dim,
        queries=needs.queries,
        windowed=needs.windowed,
        dropout=needs.dropout,
        softcap=needs.softcap,
        documents=needs.documents,
    )


def _try_blocks(needs: Needs, kernel: BlockKernel) -> None:
    try_blocks(
        kernel,
        needs.device,
        needs.dtype,
        qk_dim=needs.qk_dim,
        v_dim=needs.v_dim,
        queries=needs.queries,
        windowed=needs.windowed,
        softcap=needs.softcap,
    )


def _with_dropout(kernel: BlockKernel, choice: str, needs: Needs) -> tuple[BlockKernel, str]:
    """Adds dropout, which plain torch computes, to a kernel of blocks that has none."""
    if needs.dropout == 0.0:
        return kernel, choice
    choice = "unfused blocks (plain torch in fp32: no fused kernel draws a block's dropout again)"
    return attention_lse.with_dropout(kernel), choice


def candidates(backend: str) -> list[AttentionCandidate[AttentionKernel]]:
    """Returns the candidates of `--attention-backend asked` on CUDA, the one to try first before the others."""
    flash_3 = flash3.attention(fused)
    flash_2 = with_equal_channels(packed(flash.attention(fused), by_flash=True))
    cudnn, only_cudnn = (packed(fused_by(*kernels), by_flash=False) for kernels in ((_CUDNN, *_OTHERS), (_CUDNN,)))
    efficient, only_efficient = (
        packed(with_equal_heads(fused_by(*kernels)), by_flash=False)
        for kernels in ((_EFFICIENT, SDPBackend.MATH), (_EFFICIENT,))
    )
    third = AttentionCandidate("FlashAttention-3", _no_flash_3, flash_3, flash_3, partial(_load_flash_3, blocks=False))
    second = AttentionCandidate("FlashAttention-2", _no_flash_2, flash_2, flash_2)
    if backend == FLASH:
        return [third, second]
    if backend == FUSED:
        return [AttentionCandidate("cuDNN", _no_cudnn, cudnn, only_cudnn)]
    return [
        third,
        AttentionCandidate("cuDNN", _no_cudnn_for_all, cudnn, only_cudnn),
        second,
        AttentionCandidate("memory-efficient", _no_cap, efficient, only_efficient),
    ]


def block_candidates(backend: str) -> list[AttentionCandidate[BlockKernel]]:
    """The same of blocks. cuDNN is none: nothing says that its backward takes the log-sum-exp of other blocks, too."""
    third, second, efficient = (
        AttentionCandidate(name, missing, kernel, kernel, load)
        for name, missing, kernel, load in (
            ("FlashAttention-3", _no_flash_3, attention_lse.flash_attention_3, partial(_load_flash_3, blocks=True)),
            ("FlashAttention-2", _no_flash_2, attention_lse.flash_attention, None),
            ("memory-efficient", _no_cap, attention_lse.efficient, None),
        )
    )
    return {FLASH: [third, second], FUSED: [efficient], AUTO: [third, second, efficient]}[backend]


def _no_flash_3(needs: Needs) -> str | None:
    return flash3.unfit(needs.device, needs.dtype, (needs.qk_dim, needs.v_dim), needs.dropout)


def _load_flash_3(needs: Needs, *, blocks: bool) -> str | None:
    """Its library ends a process whose GPU does not take its kernels, so a child loads it first."""
    failure = None
    if not only_traced():
        of_any_rank = dataclasses.replace(needs, device=torch.device(needs.device.type))
        trial = partial(try_flash_3, of_any_rank, blocks=blocks)
        failure = failure_in_child(trial, needs.device, flash3.MODULE)
    return failure or flash3.load()


def try_flash_3(needs: Needs, *, blocks: bool) -> None:
    """Loads FlashAttention-3 and tries it. Raises RuntimeError if it does not do what is needed."""
    reason = flash3.load()
    if reason is not None:
        raise RuntimeError(reason)
    if blocks:
        _try_blocks(needs, attention_lse.flash_attention_3)
    else:
        _try_sequences(needs, flash3.attention(fused))


def _no_flash_2(needs: Needs) -> str | None:
    """Its windows are an argument of its operator, which takes fewer heads than torch's SDPA."""
    reason = _no_cap(needs) or flash.missing(needs.device, needs.dtype)
    head = max(needs.qk_dim, needs.v_dim)
    if reason is None and needs.windowed and not flash.by_operator(head):
        reason = f"it has no --window-size for heads of {head} channels"
    return reason


def _no_cudnn(needs: Needs) -> str | None:
    """Its windows are not in torch's SDPA, where a mask would take their place."""
    reason = _no_cap(needs) or flash.missing(needs.device, needs.dtype)
    return reason or ("torch's has no --window-size" if needs.windowed else None)


def _no_cudnn_for_all(needs: Needs) -> str | None:
    return _no_cudnn(needs) or ("it takes one document at a time" if needs.documents else None)


def _no_engine(needs: Needs) -> str | None:
    reason = _no_cap(needs) or flash.missing(needs.device, needs.dtype)
    if reason is None and needs.qk_dim != needs.v_dim:
        reason = f"it takes no values of {needs.v_dim} channels beside keys of {needs.qk_dim}"
    return reason


def _no_cap(needs: Needs) -> str | None:
    return None if needs.softcap is None else "it has no --attn-logit-softcapping"


def _choice(name: str, reasons: Sequence[str]) -> str:
    return f"{name} ({'; '.join(reasons)})" if reasons else name


def _refusal(backend: str, reasons: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"--attention-backend {backend} cannot run here: {'; '.join(reasons)}; give --attention-backend auto"
    )
