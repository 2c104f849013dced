"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, for a Hugging Face base model.

[Note: adapters of fused projections]
PEFT adapts whole modules, and some families hold several projections in one: W = [W_1; ...; W_n]. Every projection
has its own pair A_i, B_i here, so together they are one adapter of the module with n times the rank:

    A = [A_1; ...; A_n]    B = diag(B_1, ..., B_n)    B A = [B_1 A_1; ...; B_n A_n]

Alpha is n times ours, too, so that alpha / rank is the same. A projection without an adapter has zeros. In an adapter
that PEFT trained on the module all projections have the same A, and the rows of B are those of B_1 to B_n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models import mapping
from megatron.core.models.hf.delta_names import LINEARS, head_rows, projection_rows
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.names import block_of
from megatron.core.models.mapping import Part, Table
from megatron.spec.decoder import decoder_spec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.linear import LinearSpec, Projection
from megatron.spec.lora import LoraSpec, adapter_names
from megatron.spec.parameter import ParamSpec

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def adapter_table(model: ModelConfig, fused: Mapping[str, str], shared: str, *, same_a: bool = False) -> Table:
    """Maps each element of the adapters to its position in PEFT's tensors.

    fused: our linear layer in a layer -> the module that holds all its projections. shared: see ExpertNames. same_a:
    all projections of a module have the same A, as PEFT trains them; such a table can only be read. See [Note: adapters
    of fused projections].
    """
    spec, mappings, loose = decoder_spec(model), list[mapping.Mapping](), dict[str, tuple[int, ...]]()
    assert spec.lora is not None
    for number, layer in enumerate(spec.layers):
        for path, linear in layer.linears().items():
            if not spec.lora.adapts(linear):
                continue
            ours = f"decoder.layers.{number}.{path}"
            theirs = f"base_model.model.model.layers.{number}.{block_of(path, shared)}."
            if path in fused:
                theirs += fused[path]
                mappings += _fused(ours, theirs, linear, spec.lora, same_a=same_a)
                rank = spec.lora.rank * (1 if same_a else len(linear.projections))
                loose[f"{theirs}.lora_A.weight"] = (rank, linear.in_features)
                loose[f"{theirs}.lora_B.weight"] = (math.prod(linear.out_shape), rank)
                continue
            for projection in linear.projections:
                if projection.name in spec.lora.projections:
                    names, (a, b) = adapter_names(ours, projection.name), spec.lora.pair(linear, projection)
                    if isinstance(layer.attention, DeltaNetSpec) and path == LINEARS[0]:
                        mappings += _pair_of_heads(names, theirs + projection.name, a, b, projection, layer.attention)
                    else:
                        mappings += _pair(names, theirs + projection.name, a, b)
    return Table(mappings, loose)


def adapter_config(model: ModelConfig, family: Family, base: str | None) -> dict[str, Any]:
    """Returns the content of adapter_config.json. `base` is the path or name of the base model, if known.

    In families with experts PEFT takes modules that are called as projections of an MLP for those of all experts,
    wherever they are. So there it gets the weights of other MLPs as `target_parameters`, which it adapts without
    dropout.

    Raises ConfigError for adapters of projections that the family has in a module with others, each with an A of its
    own and the rows of a head together.
    """
    joined = {name for names in family.joined.values() for name in names}
    if names := [name for name in model.lora_projections if name in joined]:
        raise ConfigError(
            f"adapters of {', '.join(names)} are not written in PEFT's format for {family.model_type}, which has these "
            f"projections in {' and '.join(family.joined)}; give --saver hf for the merged model"
        )
    assert model.lora_rank
    modules, parameters, ranks, alphas = list[str](), list[str](), dict[str, int](), dict[str, float]()
    for path, linear in _adapted(model):
        names = [projection.name for projection in linear.projections if projection.name in model.lora_projections]
        if path in family.fused:
            module, count = family.fused[path], len(linear.projections)
            modules.append(module)
            ranks[module], alphas[module] = count * model.lora_rank, count * model.lora_alpha
        elif family.experts is not None and path.startswith("mlp."):
            parameters += [f"{block_of(path, family.experts.of_modules.shared)}.{name}.weight" for name in names]
        else:
            modules += names
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0 if parameters else model.lora_dropout,
        "target_modules": list(dict.fromkeys(modules)),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    # Versions of PEFT before 0.17 do not know the field.
    return config | ({"target_parameters": list(dict.fromkeys(parameters))} if parameters else {})


def _adapted(model: ModelConfig) -> Iterator[tuple[str, LinearSpec]]:
    """(path in the layer, linear layer) of all layers' adapted linear layers."""
    spec = decoder_spec(model)
    assert spec.lora is not None
    for layer in spec.layers:
        for path, linear in layer.linears().items():
            if spec.lora.adapts(linear):
                yield path, linear


def _fused(ours: str, theirs: str, linear: LinearSpec, lora: LoraSpec, *, same_a: bool) -> Iterator[mapping.Mapping]:
    row = 0
    for number, projection in enumerate(linear.projections):
        if projection.name in lora.projections:
            names, (a, b) = adapter_names(ours, projection.name), lora.pair(linear, projection)
            yield from _pair(names, theirs, a, b, row=row, rank=0 if same_a else number * lora.rank)
        row += projection.outputs.numel


def _pair_of_heads(
    ours: tuple[str, str], theirs: str, a: ParamSpec, b: ParamSpec, projection: Projection, spec: DeltaNetSpec
) -> list[mapping.Mapping]:
    """Maps one adapter of the first projection of a delta net, whose rows have another order there."""
    first = projection.outputs.offset[1]
    kinds = [(row - first, count) for row, count in projection_rows(spec, {})[projection.name]]
    parts = tuple(head_rows(ours[1], f"{theirs}.lora_B.weight", b.shape, kinds))
    whole = Box((0, 0), a.shape)
    same = Part(ours[0], whole, f"{theirs}.lora_A.weight", whole)
    return [mapping.Mapping(ours[0], a.shape, (same,)), mapping.Mapping(ours[1], b.shape, parts)]


def _pair(
    ours: tuple[str, str], theirs: str, a: ParamSpec, b: ParamSpec, *, row: int = 0, rank: int = 0
) -> list[mapping.Mapping]:
    """Maps one adapter. A is equal on both sides; B's rows are concatenated there, but may have a group dim here.

    row: the row of their tensor at which B begins. rank: the first row of their A, and column of their B.
    """
    *front, rows, columns = b.shape
    groups = math.prod(front)
    parts = tuple(
        Part(
            ours[1],
            Box((*(group for _ in front), 0, 0), (*(1 for _ in front), rows, columns)),
            f"{theirs}.lora_B.weight",
            Box((row + group * rows, rank), (rows, columns)),
        )
        for group in range(groups)
    )
    same = Part(ours[0], Box((0, 0), a.shape), f"{theirs}.lora_A.weight", Box((rank, 0), a.shape))
    return [mapping.Mapping(ours[0], a.shape, (same,)), mapping.Mapping(ours[1], b.shape, parts)]
