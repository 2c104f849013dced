"""The kernels of a run: chosen once during set-up, logged, and passed to the layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.choose_attention import choose_attention, needs_of, try_engine_attention
from megatron.kernels.choose_experts import ExpertOps, choose_experts
from megatron.kernels.choose_invariant import check_invariance, choose_invariant
from megatron.kernels.fused import LayerKernels
from megatron.kernels.ops import attention, attention_lse, gemm, grouped_gemm, weight_grad
from megatron.kernels.ops.linear import LinearKernel, PlainLinear
from megatron.kernels.transformer_engine import Engine, choose_layers, find_engine, try_layers
from megatron.spec.attention import CoreSpec
from megatron.spec.decoder import attention_core


@dataclass(frozen=True)
class Kernels:
    """The kernels that layers call. The rest is for the start-up table."""

    attention: attention.AttentionKernel
    block_attention: attention_lse.BlockKernel  # for context parallelism
    linear: LinearKernel  # the products of linear layers without FP8
    weight_grad: weight_grad.WeightGrad  # of one matrix, for FP8 layers whose weight gradients are not in FP8
    grouped: grouped_gemm.GroupedGemm  # for experts
    experts: ExpertOps
    fused: LayerKernels  # the small operations of a layer and of the loss, and the update
    attention_choice: str
    block_choice: str
    fusion_missing: str | None  # the reason why gradient accumulation is not fused into the weight-gradient GEMM
    grouped_missing: str | None  # the reason why experts do not use torch's grouped product
    experts_choice: str
    fused_choice: str
    layers_choice: str
    engine: Engine | None = None  # for FP8
    # (x [..., in], weight [out, in]) -> [..., out], and the sigmoid of such a result; both under autograd
    product: Callable[[Tensor, Tensor], Tensor] = gemm.linear
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid


def choose_kernels(
    config: ModelConfig,
    device: torch.device,
    *,
    blocks: bool = False,
    documents: bool = True,
    etp: int = 1,
    optimizer: OptimizerConfig | None = None,
) -> Kernels:
    """Returns the requested kernels, or the closest ones that can run here. All compute the same function.

    On CUDA the chosen kernels are tried on a few tokens, because builds of torch and of FlashAttention differ in what
    they support. `blocks`: whether attention runs in blocks, for context parallelism. `documents`: whether samples may
    hold several. `etp`: ranks that share an expert. `optimizer`: None where nothing is trained. Raises ConfigError for
    an --attention-backend or a --transformer-impl that cannot run.
    """
    dtype = getattr(torch, config.dtype_name)
    in_child = partial(_try_engine, config, torch.device(device.type), documents=documents)
    engine, no_engine = find_engine(config.transformer_impl, device, in_child)
    chosen = choose_attention(
        _cores(config),
        config.attention_backend,
        dtype,
        device,
        blocks=blocks or config.batch_invariant_mode,
        documents=documents,
        engine=engine,
    )
    weight_grad_kernel, missing = weight_grad.choose(config.gradient_accumulation_fusion, device, dtype)
    grouped, grouped_missing = _choose_grouped(config, device, dtype, etp)
    experts, experts_choice = choose_experts(config, device, dtype, weight_grad_kernel)
    layers = choose_layers(engine, config, device, dtype, PlainLinear(weight_grad_kernel), optimizer, blocks=blocks)
    chosen_kernels = Kernels(
        chosen.attention,
        chosen.blocks._replace(merge=layers.fused.merge),
        layers.linear,
        weight_grad_kernel,
        grouped,
        experts,
        layers.fused,
        chosen.attention_choice,
        chosen.block_choice,
        missing,
        grouped_missing,
        experts_choice,
        layers.fused_choice,
        layers.choice if not no_engine else f"local ({no_engine})",
        engine,
    )
    return (
        _independent_of_batch(chosen_kernels, config, dtype, device) if config.batch_invariant_mode else chosen_kernels
    )


def _independent_of_batch(kernels: Kernels, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Returns the kernels of --batch-invariant-mode, which take their gradients from those that were chosen."""
    experts = kernels.experts
    invariant = choose_invariant(device, kernels.fused, experts.router, kernels.block_attention, kernels.weight_grad)
    check_invariance(invariant, config, dtype, device)
    return dataclasses.replace(
        kernels,
        attention=invariant.attention,
        linear=invariant.linear,
        grouped=invariant.grouped,
        experts=experts._replace(router=invariant.router, rows=experts.rows._replace(in_tree=True)),
        fused=invariant.fused,
        attention_choice=invariant.attention_choice,
        layers_choice=invariant.layers_choice,
        product=invariant.linear.product,
        sigmoid=invariant.sigmoid,
    )


def _try_engine(config: ModelConfig, device: torch.device, *, documents: bool) -> None:
    """Runs the trials of Transformer Engine's kernels. Those that fail without an end of the process are left to
    set-up."""
    dtype = getattr(torch, config.dtype_name)
    with suppress(ConfigError):
        engine, _ = find_engine(config.transformer_impl, device)
        assert engine is not None
        needs = needs_of(_cores(config), dtype, device, documents=documents)
        try_engine_attention(config.attention_backend, needs, engine)
        try_layers(engine, config, device, dtype, PlainLinear(weight_grad.separate))


def _cores(config: ModelConfig) -> list[CoreSpec]:
    """Attention of each layer."""
    return [attention_core(config, window) for window in config.windows]


def _choose_grouped(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, etp: int
) -> tuple[grouped_gemm.GroupedGemm, str | None]:
    if config.num_experts is None:
        return grouped_gemm.loop, "the model has no experts"
    assert config.hidden_size
    return grouped_gemm.choose(device, dtype, (config.hidden_size, config.moe_ffn_dim // etp))
