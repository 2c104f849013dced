"""nanochat: RMSNorms without weights, also of the token embeddings and of rotated queries and keys, a squared ReLU, and
capped logits. Queries and keys are rotated the other way round."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import POSITIVE
from megatron.config.layer_forms import NONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import SQUARED_RELU, Family
from megatron.core.models.hf.family.llama import read_attention_bias

_CAP = "final_logit_softcapping"


def _read_nanochat(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_attention_bias(fields),
        _CAP: fields.optional_number(_CAP, POSITIVE) if fields.has(_CAP) else 15.0,
        "norm_parameters": NONE,
        "embed_layernorm": True,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
    }


def _write_nanochat(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias, _CAP: model.final_logit_softcapping}


NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    _read_nanochat,
    _write_nanochat,
    activation=SQUARED_RELU,
    gated=False,
    width=8192,
    context=2048,
    fused={"mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2"},
    swaps_halves=True,
)
