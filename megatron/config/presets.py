"""Published model shapes by name, as the flags that make them. `--preset NAME` sets them; explicit flags win."""

from __future__ import annotations

from typing import Any

from megatron.base.errors import ConfigError

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "norm_epsilon": 1e-5,
}


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, *, kv_heads: int | None = None, context: int, **more: Any
) -> dict[str, Any]:
    shape = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": context,
    }
    groups = {"group_query_attention": True, "num_query_groups": kv_heads} if kv_heads else {}
    return {**_LLAMA, **shape, **groups, **more}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 8, **more: Any) -> dict[str, Any]:
    fields = {"kv_heads": kv_heads, "context": 8192, "rotary_base": 500000.0, "vocab_size": 128256, **more}
    return _llama(layers, hidden, heads, ffn, **fields)


_LLAMA31: dict[str, Any] = {"context": 131072, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
_LLAMA32: dict[str, Any] = {
    "context": 131072,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "untie_embeddings_and_output_weights": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(6, 320, 8, 896, kv_heads=4, context=2048),
    "llama2-7b": _llama(32, 4096, 32, 11008, context=4096, vocab_size=32000),
    "llama2-13b": _llama(40, 5120, 40, 13824, context=4096, vocab_size=32000),
    "llama2-70b": _llama(80, 8192, 64, 28672, kv_heads=8, context=4096, vocab_size=32000),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336, **_LLAMA31),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672, **_LLAMA31),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248, **_LLAMA31),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, **_LLAMA32),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, **_LLAMA32),
}


def preset(name: str) -> dict[str, Any]:
    """Fields of ModelConfig for a published model. Raises ConfigError with the known names."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name} is not known; choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
