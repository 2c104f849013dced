"""StableLM 2: LayerNorm, and a quarter of each head is rotated. Attention and MLP may be parallel, behind one norm."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_stablelm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """hidden_dropout is that of the MLP alone, and is not taken over."""
    is_parallel = fields.take("use_parallel_residual", bool, False)
    fields.only("qk_layernorm", False)
    fields.number("hidden_dropout", BELOW_ONE, 0.0)
    fields.only("head_dim", common["hidden_size"] // common["num_attention_heads"])
    return {
        "normalization": "LayerNorm",
        "add_qkv_bias": fields.take("use_qkv_bias", bool, False),
        "parallel_residual": is_parallel,
        "shared_norm": is_parallel,
    }


def _write_stablelm(model: ModelConfig) -> dict[str, Any]:
    return {
        "use_qkv_bias": model.qkv_bias,
        "use_parallel_residual": model.shared_norm,
        "partial_rotary_factor": model.rotary_percent,
    }


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    _read_stablelm,
    _write_stablelm,
    groups=32,
    percent=0.25,
    epsilon=1e-5,
    fields={"rms_norm_eps": "layer_norm_eps"},
)
