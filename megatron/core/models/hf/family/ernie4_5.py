"""ERNIE 4.5 and Helium: Llamas that rotate neighbouring channels as pairs. ERNIE's experts are chosen by the scores of
a softmax and a bias."""

from __future__ import annotations

import re
from typing import Any

from megatron.config.interval import COUNT_OR_NONE, SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import layer_freq, read_experts
from megatron.core.models.hf.family.family import IN_MEMORY, NO_FIELD, ExpertNames, Family
from megatron.core.models.hf.stored import StoredTensors

_BIAS = "moe_statics.e_score_correction_bias"


def _read_ernie(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Biases are in all linear layers or in none."""
    return {"rotary_interleaved": True, "add_bias_linear": fields.take("use_bias", bool, False)}


def _write_ernie(model: ModelConfig) -> dict[str, Any]:
    return {"use_bias": model.mlp_bias}


def _read_ernie_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The last of every `moe_layer_interval` layers has experts, from the first to the last index of such layers. The
    publisher's files have further fields, with one value each."""
    layers, interval = common["num_layers"], fields.integer("moe_layer_interval", SIZE, 1)
    start, end = fields.integer("moe_layer_start_index", COUNT_OR_NONE, 1), fields.take("moe_layer_end_index", int, -1)
    has_experts = [
        (layer + 1) % interval == 0 and start <= layer <= (layers - 1 if end == -1 else end) for layer in range(layers)
    ]
    if not any(has_experts):
        raise fields.error(
            f"moe_layer_start_index {start}, moe_layer_end_index {end} and moe_layer_interval {interval} leave none of "
            f"{layers} layers with experts"
        )
    fields.only("use_bias", False)  # experts would have none, and the MLPs of other layers would
    fields.only("moe_norm_min", 1e-12)
    fields.only("moe_gate", "topk")
    fields.only("moe_use_aux_free", True)
    fields.only("use_rmsnorm", True)
    fields.take("moe_capacity", list, None)  # read by nobody: no token is dropped
    fields.has("num_nextn_predict_layers")  # of layers that are carried
    width = fields.integer("moe_intermediate_size", SIZE, 1536)
    shared = fields.integer("moe_num_shared_experts", COUNT_OR_NONE, 2)
    return {
        "rotary_interleaved": True,
        **read_experts(fields, number=64, topk=6, names=("num_experts",)),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_layer_freq": layer_freq(has_experts),
        "moe_router_enable_expert_bias": True,
    }


def _write_ernie_moe(model: ModelConfig) -> dict[str, Any]:
    """Layers with experts that no interval describes are refused: the file is then that of another model."""
    with_experts = [layer for layer, has_experts in enumerate(model.moe_layers) if has_experts]
    interval = with_experts[1] - with_experts[0] if len(with_experts) > 1 else 1
    return {
        "moe_num_experts": model.num_experts,
        "moe_k": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_dim,
        "moe_num_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.moe_ffn_dim,
        "moe_layer_start_index": with_experts[0],
        "moe_layer_end_index": with_experts[-1],
        "moe_layer_interval": interval,
    }


def _read_helium(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The output projection of attention is square, and has no bias."""
    head_dim, hidden = common["kv_channels"], common["hidden_size"]
    if head_dim * common["num_attention_heads"] != hidden:
        raise fields.error(
            f"head_dim {head_dim} times num_attention_heads {common['num_attention_heads']} is not hidden_size {hidden}"
        )
    return {
        "rotary_interleaved": True,
        "add_qkv_bias": fields.take("attention_bias", bool, False),
        "add_mlp_bias": fields.take("mlp_bias", bool, False),
    }


def _write_helium(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _read_ernie,
    _write_ernie,
    groups=2,
    head_dim=128,
    theta=500000.0,
    epsilon=1e-5,
    tied=True,
)
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _read_ernie_moe,
    _write_ernie_moe,
    groups=4,
    theta=500000.0,
    epsilon=1e-5,
    tied=True,
    width=12288,
    context=131072,
    fields={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "head_dim": NO_FIELD},
    experts=ExpertNames(
        shared="mlp.shared_experts",
        choice_bias=_BIAS,
        in_memory=IN_MEMORY | {"choice_bias": f"gate.{_BIAS}"},
    ),
    carried=re.compile(r"model\.mtp_.+"),
    stored=StoredTensors(wrapped={_BIAS: (1, 0)}),
)
HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    _read_helium,
    _write_helium,
    groups=20,
    head_dim=128,
    theta=100000.0,
    epsilon=1e-8,
)
