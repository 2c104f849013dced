"""LoRA adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors, for a Hugging Face base model."""

from __future__ import annotations

from typing import Any

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.mapping import Mapping, Part, Table
from megatron.core.transformer.lora import Piece, adapted_linears, adapter_names

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def adapter_table(model: ModelConfig) -> Table:
    """Where each element of the adapters is in PEFT's tensors."""
    assert model.num_layers
    mappings = []
    for layer in range(model.num_layers):
        for adapted in adapted_linears(model):
            block = "self_attn" if adapted.name.startswith("self_attention.") else "mlp"
            for piece in adapted.pieces:
                if piece.projection in model.lora_projections:
                    own = adapter_names(f"decoder.layers.{layer}.{adapted.name}", piece.projection)
                    theirs = f"base_model.model.model.layers.{layer}.{block}.{piece.projection}"
                    mappings += _pair(own, theirs, adapted.inputs, piece, model)
    return Table(mappings)


def adapter_config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json. `base`: path or name of the base model, if it is known."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": list(model.lora_projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _pair(own: tuple[str, str], theirs: str, inputs: int, piece: Piece, model: ModelConfig) -> list[Mapping]:
    """A is the same on both sides; B's rows follow each other, where ours may have a dim for key/value groups."""
    rank = model.lora_rank
    assert rank
    a, b = own
    whole = Box((0, 0), (rank, inputs))
    shape = (*piece.outputs.shape, rank)
    groups, rows = shape[:-1] if len(shape) == 3 else (1, shape[0])
    front = len(shape) - 2
    parts = tuple(
        Part(
            b,
            Box((*(group for _ in range(front)), 0, 0), (*(1 for _ in range(front)), rows, rank)),
            f"{theirs}.lora_B.weight",
            Box((group * rows, 0), (rows, rank)),
        )
        for group in range(groups)
    )
    return [Mapping(a, (rank, inputs), (Part(a, whole, f"{theirs}.lora_A.weight", whole),)), Mapping(b, shape, parts)]
