"""Mixtral: a Mistral with experts in every layer, weighted by a softmax over the chosen ones."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts
from megatron.core.models.hf.family.family import ExpertNames, Family


def _read_mixtral(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """intermediate_size is the width of an expert. A missing window is none, unlike in a Mistral."""
    fields.only("router_jitter_noise", 0.0)
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return {
        **read_experts(fields, number=8, topk=2),
        **({} if window is None else {"window_size": f"{window - 1},0"}),
    }


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.moe_ffn_dim,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "sliding_window": model.window,
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read_mixtral,
    _write_mixtral,
    groups=8,
    theta=1e6,
    epsilon=1e-5,
    experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
)
