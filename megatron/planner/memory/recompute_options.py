"""The ways to recompute one layer, among which --recompute-policy balanced chooses."""

from __future__ import annotations

from megatron.config.recompute import (
    BLOCK,
    CORE_ATTN,
    FULL,
    KEEP_ALL,
    MLA_UP_PROJ,
    MLP_ACT,
    MOE_ACT,
    NORM,
    SELECTIVE,
    SHARED_EXPERTS,
    WHOLE_MLP,
    WHOLE_MOE,
    RecomputeConfig,
)
from megatron.spec.decoder import LayerSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.moe import MoESpec

RECOMPUTE_WHOLE_LAYER = RecomputeConfig(recompute_granularity=FULL, recompute_method=BLOCK, recompute_num_layers=1)


def parts(*names: str) -> RecomputeConfig:
    """The configuration that recomputes these parts of a layer."""
    return RecomputeConfig(recompute_granularity=SELECTIVE, recompute_modules=names) if names else KEEP_ALL


def part_sets(layer: LayerSpec) -> list[RecomputeConfig]:
    """The sets of parts from which a layer chooses. The first is empty."""
    mlps: tuple[tuple[str, ...], ...] = ((), (MLP_ACT,), (WHOLE_MLP,))
    if isinstance(layer.mlp, MoESpec):
        mlps = ((), (MOE_ACT,), (WHOLE_MOE,))
        if layer.mlp.shared is not None:
            mlps = (*mlps, (SHARED_EXPERTS,), (SHARED_EXPERTS, MOE_ACT))
    attentions: tuple[tuple[str, ...], ...] = ((), (CORE_ATTN,))
    if isinstance(layer.attention, LatentAttentionSpec):
        attentions = (*attentions, (MLA_UP_PROJ,), (CORE_ATTN, MLA_UP_PROJ))
    norms: tuple[tuple[str, ...], ...] = ((),) if layer.shares_norm else ((), (NORM,))
    return [parts(*attention, *norm, *mlp) for attention in attentions for norm in norms for mlp in mlps]


def option_name(config: RecomputeConfig) -> str:
    """Returns the name of a layer's option."""
    return "keep" if config is KEEP_ALL else str(config).replace(" ", "+")
