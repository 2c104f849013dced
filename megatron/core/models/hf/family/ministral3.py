"""Ministral 3 and Mistral 4: queries are scaled by their position, beyond the first context of YaRN. Mistral 4 has
latent attention, and experts that are chosen by a softmax beside shared ones."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.deepseek import LATENT_NORMS, read_latents, write_latents
from megatron.core.models.hf.family.experts import read_normalization, write_normalization
from megatron.core.models.hf.family.family import IN_MEMORY, ExpertNames, Family
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    write_shared_and_routed,
)
from megatron.core.models.hf.family.windows import read_window
from megatron.core.models.hf.rotary import write_rotary

_EXPERTS = ExpertDefaults(experts=128, topk=4, width=2048, dense=0)


def _read_ministral3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without the field no layer has a window."""
    window = read_window(fields, default=None)
    return {} if window is None else {"window_size": f"{window - 1},0"}


def _write_ministral3(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window}


def _read_mistral4(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    for name in ("n_group", "topk_group", "pretraining_tp"):
        fields.only(name, 1)
    return {
        **read_latents(fields, common, 1024, (64, 64, 128)),
        **read_shared_and_routed(fields, common["num_layers"], _EXPERTS),
        **read_normalization(fields, default=True),
    }


def _write_mistral4(model: ModelConfig) -> dict[str, Any]:
    """The rotated part of a head has to be in rope_scaling, because transformers takes it from there alone."""
    latents = write_latents(model)
    scaling = latents.get("rope_scaling") or write_rotary(model)["rope_scaling"] or {}
    share = {"partial_rotary_factor": model.qk_pos_emb_head_dim / model.head_dim}
    others = {**write_shared_and_routed(model), **write_normalization(model)}
    return {**latents, **others, "head_dim": model.head_dim, "rope_scaling": scaling | share}


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    _read_ministral3,
    _write_ministral3,
    groups=8,
    head_dim=128,
    theta=1e6,
    epsilon=1e-5,
    scales_queries=True,
)
MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    _read_mistral4,
    _write_mistral4,
    head_dim=128,
    norms=LATENT_NORMS,
    experts=ExpertNames(shared="mlp.shared_experts", stacked=IN_MEMORY["stacked"]),
    scales_queries=True,
)
