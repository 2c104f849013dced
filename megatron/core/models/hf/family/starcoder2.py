"""StarCoder2: LayerNorm, an MLP without a gate, biases, and a sliding window."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, Family


def _read_starcoder2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Biases are in all linear layers or in none. Some fields of the publisher's files are not read by transformers."""
    fields.only("norm_type", "layer_norm")
    fields.only("mlp_type", "default")
    for name in ("activation_function", "layer_norm_epsilon", "scale_attn_weights"):
        fields.take(name, object, None)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.take(name, bool, True)
    residual, embedding = (fields.number(f"{name}_dropout", BELOW_ONE, 0.0) for name in ("residual", "embedding"))
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return {
        "normalization": "LayerNorm",
        "add_bias_linear": fields.take("use_bias", bool, True),
        "hidden_dropout": residual if residual == embedding else 0.0,
        "window_size": None if window is None else f"{window - 1},0",
    }


def _write_starcoder2(model: ModelConfig) -> dict[str, Any]:
    return {
        "use_bias": model.mlp_bias,
        "sliding_window": model.window,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
    }


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _read_starcoder2,
    _write_starcoder2,
    groups=2,
    epsilon=1e-5,
    std=0.018042,
    tied=True,
    activation=GELU_TANH,
    gated=False,
    fields={"rms_norm_eps": "norm_epsilon"},
    fused={"mlp.linear_fc1": "c_fc", "mlp.linear_fc2": "c_proj"},
)
