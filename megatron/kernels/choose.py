"""The kernels of a run: chosen once during set-up, logged, and passed to the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.model import ModelConfig
from megatron.kernels.backends import flash
from megatron.kernels.ops import attention, attention_lse, attention_packed, grouped_gemm, weight_grad
from megatron.kernels.ops.attention_trial import try_attention, try_blocks


@dataclass(frozen=True)
class Kernels:
    """The kernels that layers call. The rest is for the start-up table."""

    attention: attention.AttentionKernel
    block_attention: attention_lse.BlockKernel  # for context parallelism
    weight_grad: weight_grad.WeightGrad
    grouped: grouped_gemm.GroupedGemm  # for experts
    attention_choice: str
    block_choice: str
    fusion_missing: str | None  # the reason why gradient accumulation is not fused into the weight-gradient GEMM
    grouped_missing: str | None  # the reason why experts do not use torch's grouped product


def choose_kernels(config: ModelConfig, device: torch.device, *, blocks: bool = False, etp: int = 1) -> Kernels:
    """Returns the requested kernels, or the closest ones that can run here. All compute the same function.

    On CUDA the chosen kernels are tried on a few tokens, because builds of torch and of FlashAttention differ in what
    they support. `blocks`: whether attention runs in blocks, for context parallelism. `etp`: ranks that share an expert.
    """
    dtype, softcap = getattr(torch, config.dtype_name), config.attn_logit_softcapping
    found = _find_flash(config, device, dtype, blocks=blocks)
    attention_kernel, choice = attention.choose(config.attention_backend, device, dtype, softcap, found)
    block_kernel, block_choice = attention_lse.choose(
        config.attention_backend, device, dtype, config.attention_dropout, softcap, found
    )
    weight_grad_kernel, missing = weight_grad.choose(config.gradient_accumulation_fusion, device, dtype)
    grouped, grouped_missing = _choose_grouped(config, device, dtype, etp)
    return Kernels(
        attention_kernel,
        block_kernel,
        weight_grad_kernel,
        grouped,
        choice,
        block_choice,
        missing,
        grouped_missing,
    )


def _choose_grouped(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, etp: int
) -> tuple[grouped_gemm.GroupedGemm, str | None]:
    if config.num_experts is None:
        return grouped_gemm.loop, "the model has no experts"
    assert config.hidden_size
    return grouped_gemm.choose(device, dtype, (config.hidden_size, config.moe_ffn_dim // etp))


def _find_flash(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, blocks: bool) -> flash.Flash:
    """Returns the FlashAttention that runs this model here."""
    if config.attention_backend not in ("auto", "flash") or config.attn_logit_softcapping is not None:
        return flash.Flash(None, "not asked for")

    def trial() -> None:
        assert config.num_attention_heads
        head, queries = config.head_dim, config.num_attention_heads // config.num_kv_heads
        windowed, dropout = any(window is not None for window in config.windows), config.attention_dropout
        kernel = attention_packed.packed(flash.attention(attention.fused), by_flash=True)
        try_attention(kernel, device, dtype, head=head, queries=queries, windowed=windowed, dropout=dropout)
        if blocks:
            try_blocks(attention_lse.flash_attention, device, dtype, head=head, queries=queries, windowed=windowed)

    return flash.find(device, dtype, config.attention_dropout, trial)
