"""Kimi Linear: delta nets whose decay is that of each channel, latent attention without positions in the other layers,
and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any

from megatron.config.delta_net import KDA
from megatron.config.interval import SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.deepseek import LATENT_NORMS, read_latents, write_latents
from megatron.core.models.hf.family.experts import mlp_layer_types
from megatron.core.models.hf.family.family import IN_MEMORY, ExpertNames, Family
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
    write_sigmoid_choice,
)
from megatron.core.models.hf.stored import StoredTensors

_EXPERTS = ExpertDefaults(experts=256, topk=8, width=1024, dense=1, scale=2.446)
_KINDS = ("full_attention", "linear_attention")
_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}


def _read_kimi_linear(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The publisher's files have the sizes and the layers of delta nets in a dict of their own."""
    if not common["untie_embeddings_and_output_weights"]:
        raise fields.error("tie_word_embeddings is true, and transformers ties none in this family")
    fields.only("mla_use_nope", True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
    fields.only("pretraining_tp", 1)
    fields.take("use_grouped_topk", bool, True)
    if fields.has("head_dim"):  # read by nobody
        fields.take("head_dim", int, None)
    layers, nested = common["num_layers"], fields.take("linear_attn_config", dict, None) or {}
    linear = fields.below("linear_attn_config", nested)
    size = linear.integer("head_dim", SIZE, fields.integer("linear_head_dim", SIZE, 128))
    heads = linear.integer("num_heads", SIZE, fields.integer("linear_num_heads", SIZE, 32))
    taps = linear.integer("short_conv_kernel_size", SIZE, fields.integer("linear_conv_kernel_dim", SIZE, 4))
    full: list[Any] = linear.take("full_attn_layers", list, [layer + 1 for layer in range(4, layers, 4)])
    others: list[Any] = linear.take("kda_layers", list, [layer for layer in range(1, layers + 1) if layer not in full])
    linear.finish()
    if sorted([*full, *others]) != list(range(1, layers + 1)):
        raise fields.error(f"full_attn_layers {full} and kda_layers {others} do not name each of {layers} layers once")
    default = [_KINDS[int(layer + 1 not in full)] for layer in range(layers)]
    kinds: list[Any] = fields.take("layer_types", list, default)
    if len(kinds) != layers or set(kinds) != set(_KINDS):
        raise fields.error(f"layer_types has to name {layers} layers, each {' or '.join(_KINDS)}, with both kinds")
    return {
        **read_latents(fields, common, None, (128, 64, 128)),
        **read_shared_and_routed(fields, layers, _EXPERTS, lists_layers=True),
        **read_sigmoid_choice(fields, _EXPERTS),
        "position_embedding_type": "none",
        "rotary_base": 10000.0,
        "experimental_attention_variant": KDA,
        "linear_attention_freq": str([_KINDS.index(kind) for kind in kinds]),
        "linear_conv_kernel_dim": taps,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }


def _write_kimi_linear(model: ModelConfig) -> dict[str, Any]:
    fields = {**write_latents(model), **write_shared_and_routed(model), **write_sigmoid_choice(model)}
    return fields | {
        "linear_head_dim": model.linear_key_head_dim,
        "linear_num_heads": model.linear_num_key_heads,
        "linear_conv_kernel_dim": model.linear_conv_kernel_dim,
        "layer_types": [_KINDS[int(has_delta_net)] for has_delta_net in model.delta_layers],
        "mlp_layer_types": mlp_layer_types(model),
    }


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _read_kimi_linear,
    _write_kimi_linear,
    head_dim=64,
    epsilon=1e-5,
    width=9216,
    context=1048576,
    fields=_NAMES,
    norms={**LATENT_NORMS, "self_attention.out_norm": "self_attn.o_norm"},
    experts=ExpertNames(
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        shared="block_sparse_moe.shared_experts",
        in_memory=IN_MEMORY | {"shared": "mlp.shared_experts"},
    ),
    stored=StoredTensors(wrapped={"self_attn.A_log": (2, 1), "forget_gate.A_log": (2, 1)}),
)
