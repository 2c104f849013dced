"""Latent attention to the keys that an indexer chooses for each query: DeepSeek-V3.2, and GLM-5 with its successors.

The indexer chooses all keys while there are no more than `index_topk`. Up to that length the model is the one without
the indexer, and so it is trained and run here, with nothing longer (--indexer-topk). The indexer's tensors are carried.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.interval import SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.deepseek import (
    LATENT_NORMS,
    SHARED_EXPERTS,
    V3,
    read_latents,
    read_published,
)
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.shared_experts import ExpertDefaults, read_shared_and_routed, read_sigmoid_choice

GLM_5 = ExpertDefaults(experts=256, topk=8, width=2048, dense=3, scale=2.5)
_INDEXER = re.compile(r"model\.layers\.\d+\.self_attn\.indexer\..+")
_SIZES = ("index_head_dim", "index_n_heads")
# Which layers have an indexer, and which share that of a layer before them: only the indexers' tensors depend on it.
_SHARED = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
_ROTATION = "indexer_rope_interleave"


def _read_indexed(
    fields: JsonFields, common: dict[str, Any], experts: ExpertDefaults, queries: int, heads: tuple[int, int, int]
) -> dict[str, Any]:
    """queries, heads: as in `read_latents`."""
    read_published(fields, "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    fields.only("mlp_bias", False)
    kinds: list[Any] | None = fields.take("layer_types", list, None)
    if kinds is not None and set(kinds) != {"indexed_attention"}:
        raise fields.error(f"layer_types is {kinds}; only indexed_attention in all layers is supported")
    for name in (*_SIZES, *_SHARED, _ROTATION):
        fields.has(name)
    return {
        **read_latents(fields, common, queries, heads),
        **read_shared_and_routed(fields, common["num_layers"], experts, lists_layers=True),
        **read_sigmoid_choice(fields, experts),
        "indexer_topk": fields.integer("index_topk", SIZE, 2048),
    }


def _read_v32(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return _read_indexed(fields, common, V3, 1536, (128, 64, 128))


def _read_glm_5(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return _read_indexed(fields, common, GLM_5, 2048, (192, 64, 256))


def _write_indexed(model: ModelConfig) -> dict[str, Any]:
    """Raises ConfigError: the sizes of the indexer are in the config.json of the folder only, which is written back
    where it describes the model."""
    raise ConfigError(
        f"a model with an indexer (--indexer-topk {model.indexer_topk}) is written with the config.json that it came "
        "with, and there is none of this model; go on from its checkpoint or its folder, without other sizes, or give "
        "--override-model-fields indexer_topk for the model without the indexer"
    )


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    _read_v32,
    _write_indexed,
    head_dim=64,
    norms=LATENT_NORMS,
    experts=SHARED_EXPERTS,
    predicts=True,
    carried=_INDEXER,
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    _read_glm_5,
    _write_indexed,
    head_dim=64,
    epsilon=1e-5,
    norms=LATENT_NORMS,
    experts=SHARED_EXPERTS,
    predicts=True,
    carried=_INDEXER,
)
