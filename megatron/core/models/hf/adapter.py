"""Reads a PEFT adapter's folder as a source of weights: the inverse of peft.py.

Only plain LoRA is supported: features that change the model in another way are rejected by name. Rank-stabilised
scaling, alpha / sqrt(r), is plain LoRA with another alpha.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.read_file import read_json
from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE, POSITIVE
from megatron.config.layers import GROUPED_PROJECTIONS, PROJECTIONS, lora_projections
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import TensorFile, narrow
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.families import FAMILIES
from megatron.core.models.hf.family.family import ExpertNames
from megatron.core.models.hf.peft import ADAPTER_CONFIG, ADAPTER_FILE, adapter_table
from megatron.core.models.mapping import gather
from megatron.core.models.source import Source
from megatron.spec.lora import is_adapter

_OLD_FILE = "adapter_model.bin"
# Names of the shared experts in transformers' layers.
_SHARED = tuple({family.experts.of_modules.shared for family in FAMILIES.values() if family.experts is not None})
# Bookkeeping, and settings of disabled features. The modules with adapters follow from the tensors.
_HARMLESS = frozenset(
    ["auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_core"]
    + ["qalora_group_size", "exclude_modules"]
)
_STARTS = (True, "gaussian")  # values of init_lora_weights that leave the base model's weights unchanged
# A module that holds all projections of a linear layer of ours -> its path in a layer, and that of an MLP without a gate.
_ADAPTED = [family for family in FAMILIES.values() if family.has_adapters]
_FUSED = {module: path for family in _ADAPTED for path, module in family.fused.items()}
_UNGATED = {module for family in _ADAPTED if not family.gated for module in family.fused.values()}
_SUPPORTED = (*PROJECTIONS, *_FUSED)


@dataclass(frozen=True)
class AdapterForm:
    """The content of an adapter_config.json.

    model: LoRA fields of ModelConfig. fused, same_a: see `adapter_table`.
    """

    model: dict[str, Any]
    fused: Mapping[str, str]
    same_a: bool


class AdapterSource:
    """The adapters of a PEFT folder, for a model without adapters: a Source of parameters for which `is_adapter` holds.

    `model` is the base with the adapters' rank, alpha, dropout and projections.
    """

    def __init__(self, path: Path, base: ModelConfig) -> None:
        """Raises CheckpointError for files that are missing, damaged, unsupported, or made for another model."""
        if base.lora_rank is not None:
            raise CheckpointError(
                f"the model has LoRA adapters already; {path} cannot be added to them. Merge them into it first with "
                "tools/checkpoint/convert.py --loader megatron --saver megatron"
            )
        form = _read_form(path)
        self.model = dataclasses.replace(base, **form.model)
        self._file = TensorFile(path / ADAPTER_FILE)
        entries = self._file.entries
        # The names of the base model's family, which the adapter's own config does not say.
        shared = next((name for name in _SHARED if any(f".{name}." in key for key in entries)), ExpertNames().shared)
        self.table = adapter_table(self.model, form.fused, shared, same_a=form.same_a)
        self.shapes = self.table.ours
        self.dtype: torch.dtype = next(iter(entries.values())).dtype
        self.carried = CarriedTensors()
        for name in sorted({*self.table.theirs, *entries}):
            shape = list(entries[name].shape) if name in entries else "nothing"
            called_for = list(self.table.theirs[name]) if name in self.table.theirs else "nothing"
            if shape != called_for:
                raise CheckpointError(
                    f"{path / ADAPTER_FILE}: tensor {name} is {shape}, and its {ADAPTER_CONFIG} requires on this model "
                    f"{called_for}; give the model that the adapter was trained on"
                )
        if not form.same_a:
            self._check_blocks(path, form.fused)

    def _check_blocks(self, path: Path, fused: Mapping[str, str]) -> None:
        """Raises CheckpointError for adapters of fused projections that are not one pair per projection."""
        ends = tuple(f".{module}.lora_B.weight" for module in fused.values())
        for name in (name for name in self.table.theirs if name.endswith(ends)):
            shape = self.table.theirs[name]
            beside = self._file.view(name).clone()
            for block, _, _ in self.table.of_theirs(name, Box((0, 0), shape)):
                narrow(beside, block).zero_()
            if beside.any():
                raise CheckpointError(
                    f"{path / ADAPTER_FILE}: {name} has values outside the blocks of its projections, which were not "
                    "adapted one by one; merge it into the model with PEFT's merge_and_unload"
                )

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter; see Source."""
        return gather(self.table.of_ours(name, box), box, dtype, lambda key, part: narrow(self._file.view(key), part))


class AdaptedSource:
    """A model's weights from `base` and those of its adapters from `adapter`, as one Source."""

    def __init__(self, base: Source, adapter: AdapterSource) -> None:
        self._base, self._adapter = base, adapter
        self.model = adapter.model
        self.shapes = {**base.shapes, **adapter.shapes}
        self.dtype, self.carried = base.dtype, base.carried

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter; see Source."""
        return (self._adapter if is_adapter(name) else self._base).read(name, box, dtype)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Returns the LoRA fields of ModelConfig that a PEFT folder describes.

    Reads its JSON and the header of its weights, without communication. Raises CheckpointError for files that are
    missing, damaged or unsupported.
    """
    return _read_form(path).model


def _read_form(path: Path) -> AdapterForm:
    file = path / ADAPTER_CONFIG
    try:
        values = read_json(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{file} is not there; give a folder in PEFT's format: {ADAPTER_CONFIG}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    # All versions of PEFT write disabled features as false or empty values.
    off: tuple[Any, ...] = (None, {}, [])
    fields = JsonFields({k: v for k, v in values.items() if v is not False and v not in off}, str(file))
    fields.only("peft_type", "LORA")
    fields.only("task_type", "CAUSAL_LM")
    fields.only("bias", "none")
    start = fields.take("init_lora_weights", (bool, str), True)
    if start not in _STARTS:
        raise fields.error(
            f"init_lora_weights is {start!r}, which may change the base model's weights; only true, false and gaussian "
            "are supported"
        )
    rank = fields.integer("r", AT_LEAST_ONE, 8)
    alpha, stabilised = fields.number("lora_alpha", POSITIVE, 8), fields.take("use_rslora", bool, False)
    modules = _modules(path, fields)
    projections = {module: _projections_of(module) for module in modules}
    model = {
        "lora_rank": rank,
        "lora_alpha": alpha * math.sqrt(rank) if stabilised else alpha,
        "lora_dropout": fields.number("lora_dropout", BELOW_ONE, 0.0),
        "lora_target_modules": tuple(
            name for name in PROJECTIONS if any(name in several for several in projections.values())
        ),
    }
    fused = {_FUSED[module]: module for module in modules if module in _FUSED}
    # With rank-stabilised scaling no alpha of ours is written, and PEFT's own patterns are not supported.
    counts = {} if stabilised else {module: len(projections[module]) for module in fused.values()}
    same_a = _has_one_rank(fields, [{module: n * value for module, n in counts.items()} for value in (rank, alpha)])
    fields.finish(_HARMLESS, "only plain LoRA, the same in all layers, is supported")
    return AdapterForm(model, fused, same_a)


def check_no_adapter(folder: Path, applied: str | None) -> None:
    """Raises CheckpointError for a model's folder with an adapter in it, which transformers would apply to the model.

    `applied` is the folder of the requested adapter.
    """
    if (folder / ADAPTER_CONFIG).is_file() and (applied is None or Path(applied).resolve() != folder.resolve()):
        raise CheckpointError(
            f"{folder} holds an adapter in addition to the model ({ADAPTER_CONFIG}), which transformers applies; give "
            f"--load-adapter {folder}, or remove that file"
        )


def _projections_of(module: str) -> tuple[str, ...]:
    """The projections that a module holds, in their order."""
    if module in PROJECTIONS:
        return (module,)
    layer = _FUSED[module].rpartition(".")[2]
    return lora_projections((layer,), attention=GROUPED_PROJECTIONS, gated=module not in _UNGATED)


def _has_one_rank(fields: JsonFields, of_blocks: list[dict[str, float]]) -> bool:
    """Returns True without patterns of rank and alpha, and False for those of a block per projection of fused modules.

    Raises CheckpointError for any other.
    """
    patterns = [fields.take(name, dict, {}) for name in ("rank_pattern", "alpha_pattern")]
    if patterns == [{}, {}]:
        return True
    if patterns != of_blocks:
        raise fields.error(
            f"rank_pattern = {patterns[0]} and alpha_pattern = {patterns[1]}; only plain LoRA of one rank is "
            "supported, and r and lora_alpha times the number of projections for modules that hold several"
        )
    return False


def _modules(path: Path, fields: JsonFields) -> list[str]:
    """Returns the names of the modules that have tensors. Raises CheckpointError unless they are those that the file
    names."""
    if not (path / ADAPTER_FILE).is_file() and (path / _OLD_FILE).exists():
        raise CheckpointError(
            f"{path} holds {_OLD_FILE}, which could run code when it is read; save the adapter again with safetensors"
        )
    entries = TensorFile(path / ADAPTER_FILE).entries
    if of_experts := next((name for name in sorted(entries) if ".experts." in name), None):
        raise fields.error(
            f"{ADAPTER_FILE} has tensor {of_experts}; routed experts take no adapters here. Merge it into the model "
            "with PEFT's merge_and_unload"
        )
    modules = {match[1] for name in entries if (match := re.search(r"\.(\w+)\.lora_[AB]\.weight$", name))}
    weights = fields.take("target_parameters", list, [])
    has_modules = fields.has("target_modules") or not weights
    named = fields.take("target_modules", (list, str)) if has_modules else []
    if isinstance(named, list):
        ends = {str(name).removesuffix(".weight").rsplit(".", 1)[-1] for name in (*named, *weights)}
        if unknown := sorted(ends - set(_SUPPORTED)):
            raise fields.error(f"target_modules names {', '.join(unknown)}; only {', '.join(_SUPPORTED)} are supported")
        if ends != modules:
            raise fields.error(
                f"target_modules names {', '.join(sorted(ends))}, and {ADAPTER_FILE} has tensors of "
                f"{', '.join(sorted(modules)) or 'none'}"
            )
    if not modules or not modules <= set(_SUPPORTED):
        raise fields.error(
            f"{ADAPTER_FILE} has tensors of {', '.join(sorted(modules)) or 'no projection'}; only adapters of "
            f"{', '.join(_SUPPORTED)} are supported"
        )
    return [module for module in _SUPPORTED if module in modules]
