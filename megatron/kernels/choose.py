"""The kernels of a run: chosen once during set-up, logged, and passed to the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.model import ModelConfig
from megatron.kernels.ops import attention, attention_lse, weight_grad


@dataclass(frozen=True)
class Kernels:
    """The kernels that layers call. `attention_choice`, `block_choice` and `fusion_missing` are for the start-up table."""

    attention: attention.AttentionKernel
    block_attention: attention_lse.BlockKernel  # for context parallelism
    weight_grad: weight_grad.WeightGrad
    attention_choice: str
    block_choice: str
    fusion_missing: str | None  # the reason why gradient accumulation is not fused into the weight-gradient GEMM


def choose_kernels(config: ModelConfig, device: torch.device) -> Kernels:
    """Returns the requested kernels, or the closest ones that can run here. All compute the same function."""
    dtype, softcap = getattr(torch, config.dtype_name), config.attn_logit_softcapping
    attention_kernel, choice = attention.choose(config.attention_backend, device, dtype, softcap)
    block_kernel, block_choice = attention_lse.choose(
        config.attention_backend, device, dtype, config.attention_dropout, softcap
    )
    weight_grad_kernel, missing = weight_grad.choose(config.gradient_accumulation_fusion, device, dtype)
    return Kernels(attention_kernel, block_kernel, weight_grad_kernel, choice, block_choice, missing)
