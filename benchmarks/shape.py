"""The shape of a benchmark's Llama model, from the command line."""

from __future__ import annotations

import argparse

from megatron.config.model import ModelConfig
from megatron.config.presets import preset


def llama(args: argparse.Namespace) -> ModelConfig:
    """Returns the model of --layers, --hidden, --ffn, --heads, --kv-heads, --vocab and --dtype."""
    shape = {
        **preset("llama-tiny"),
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": args.ffn,
        "num_attention_heads": args.heads,
        "num_query_groups": args.kv_heads,
        "vocab_size": args.vocab,
        "bf16": args.dtype == "bfloat16",
    }
    return ModelConfig(**shape)
