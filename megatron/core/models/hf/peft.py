"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, for a Hugging Face base model."""

from __future__ import annotations

import math
from typing import Any

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.lora import PROJECTIONS
from megatron.config.model import ModelConfig
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.names import block_of
from megatron.core.models.mapping import Mapping, Part, Table
from megatron.spec.decoder import decoder_spec
from megatron.spec.lora import adapter_names
from megatron.spec.parameter import ParamSpec

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_OF_ATTENTION, _OF_MLPS = PROJECTIONS[:4], PROJECTIONS[4:]


def adapter_table(model: ModelConfig) -> Table:
    """Maps each element of the adapters to its position in PEFT's tensors."""
    spec, mappings = decoder_spec(model), list[Mapping]()
    assert spec.lora is not None
    for number, layer in enumerate(spec.layers):
        for path, linear in layer.linears().items():
            block = block_of(path)
            for projection in linear.projections:
                if projection.name in spec.lora.projections:
                    own = adapter_names(f"decoder.layers.{number}.{path}", projection.name)
                    theirs = f"base_model.model.model.layers.{number}.{block}.{projection.name}"
                    mappings += _pair(own, theirs, *spec.lora.pair(linear, projection))
    return Table(mappings)


def check_peft_holds(family: Family, model: ModelConfig) -> None:
    """Raises ConfigError for adapters that PEFT would not apply as they are here.

    PEFT adapts whole modules: of projections that the family's modules hold as one it would leave adapters out, with a
    warning. In models with experts it takes the projections of MLPs for those of all experts, which have no adapters here.
    """
    adapted = adapted_projections(model)
    if family.experts is not None and (wrong := [name for name in adapted if name in _OF_MLPS]):
        raise ConfigError(
            f"PEFT takes adapters of {', '.join(wrong)} in {family.architecture} for those of its experts, which have none "
            f"here; give --lora-target-modules {' '.join(_OF_ATTENTION)}, or write the merged model with "
            "tools/checkpoint/convert.py --saver hf"
        )
    linears = decoder_spec(model).layers[0].linears()
    joined = {each.name: module for path, module in family.fused.items() for each in linears[path].projections}
    if wrong := [name for name in adapted if name in joined]:
        modules = ", ".join(dict.fromkeys(joined[name] for name in wrong))
        rest = " ".join(
            each.name for linear in linears.values() for each in linear.projections if each.name not in joined
        )
        raise ConfigError(
            f"PEFT has no adapters of {', '.join(wrong)} in {family.architecture}, which holds them in {modules}; give "
            f"--lora-target-modules {rest}, or write the merged model with tools/checkpoint/convert.py --saver hf"
        )


def adapted_projections(model: ModelConfig) -> list[str]:
    """Returns the projections with adapters: those that were asked for and that some layer has. Experts have none."""
    layers = decoder_spec(model).layers
    there = {each.name for layer in layers for linear in layer.linears().values() for each in linear.projections}
    return [name for name in model.lora_projections if name in there]


def adapter_config(model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Returns the content of adapter_config.json. `base` is the path or name of the base model, if known."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": adapted_projections(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _pair(own: tuple[str, str], theirs: str, a: ParamSpec, b: ParamSpec) -> list[Mapping]:
    """Maps one adapter. A is equal on both sides; B's rows are concatenated there, but may have a group dim here."""
    whole = Box((0, 0), a.shape)
    *front, rows, rank = b.shape
    groups = math.prod(front)
    parts = tuple(
        Part(
            own[1],
            Box((*(group for _ in front), 0, 0), (*(1 for _ in front), rows, rank)),
            f"{theirs}.lora_B.weight",
            Box((group * rows, 0), (rows, rank)),
        )
        for group in range(groups)
    )
    same = Part(own[0], whole, f"{theirs}.lora_A.weight", whole)
    return [Mapping(own[0], a.shape, (same,)), Mapping(own[1], b.shape, parts)]
