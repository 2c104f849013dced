"""gpt-oss: experts in all layers with biases, a clamped gate and YaRN, windows in every other layer, and sinks."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, POSITIVE
from megatron.config.layer_forms import LEARNABLE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, window_flags
from megatron.core.models.hf.rotary import read_yarn, write_rotary
from megatron.core.models.hf.stored import StoredTensors
from megatron.kernels.ops.activation import QUICK

_WINDOW = 128
# Transformers' values where the file says nothing about rotary embeddings.
_YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
# The publisher's other names of num_experts_per_tok and of YaRN's original context, which transformers does not read.
_UNREAD = ("experts_per_token", "initial_context_length")


def _read_gpt_oss(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention_bias", True)
    fields.only("swiglu_alpha", QUICK)
    for name in _UNREAD:
        fields.take(name, int, None)
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    if window is None and not fields.has("sliding_window"):
        window = _WINDOW
    slides = read_sliding_layers(fields, [layer % 2 == 0 for layer in range(common["num_layers"])])
    if any(slides) and window is None:
        raise fields.error("layer_types has sliding_attention, but sliding_window is null")
    yarn = {}
    if all(fields.take(name, dict, None) is None for name in ("rope_scaling", "rope_parameters")):
        yarn = read_yarn(JsonFields(dict(_YARN), "rope_parameters"), common["max_position_embeddings"])
    return {
        **read_experts(fields, number=128, topk=4, names=("num_local_experts",)),
        **window_flags(window, slides),
        **yarn,
        "add_bias_linear": True,
        "softmax_type": LEARNABLE,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": fields.number("swiglu_limit", POSITIVE, 7.0),
    }


def _write_gpt_oss(model: ModelConfig) -> dict[str, Any]:
    """A missing scaling would mean YaRN, and transformers needs a window even where no layer has it."""
    plain = {"rope_scaling": {"rope_type": "default"}} if write_rotary(model)["rope_scaling"] is None else {}
    return {
        **plain,
        "intermediate_size": model.moe_ffn_dim,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "sliding_window": model.window or _WINDOW,
        "layer_types": layer_types(model),
        "swiglu_limit": model.activation_func_clamp_value,
        "attention_bias": True,
    }


_WEIGHTS, _BIASES = ((f"experts.gate_up_proj{end}", f"experts.down_proj{end}") for end in ("", "_bias"))
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read_gpt_oss,
    _write_gpt_oss,
    groups=8,
    head_dim=64,
    theta=150000.0,
    epsilon=1e-5,
    width=2880,
    experts=ExpertNames(
        router="router",
        stacked=_WEIGHTS,
        biases=_BIASES,
        in_memory={"block": "mlp", "router": "router", "stacked": _WEIGHTS},
    ),
    stored=StoredTensors(transposed=_WEIGHTS, interleaved=(_WEIGHTS[0], _BIASES[0])),
)
