"""GLM-4.5 to GLM-4.7: a sigmoid of each expert's logit and a bias of the choice, a shared expert, dense first
layers."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
    write_sigmoid_choice,
)

GLM_4_5 = ExpertDefaults(experts=128, topk=8, width=1408, dense=1)


def _read_glm4_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_shared_and_routed(fields, common["num_layers"], GLM_4_5),
        **read_sigmoid_choice(fields, GLM_4_5),
        "add_qkv_bias": fields.take("attention_bias", bool, False),
        "qk_layernorm": fields.take("use_qk_norm", bool, False),
    }


def _write_glm4_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shared_and_routed(model),
        **write_sigmoid_choice(model),
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_layernorm,
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read_glm4_moe,
    _write_glm4_moe,
    groups=8,
    percent=0.5,
    epsilon=1e-5,
    experts=ExpertNames(shared="mlp.shared_experts"),
    predicts=True,
)
