"""Reads a PEFT adapter's folder as a source of weights: the inverse of peft.py.

Only plain LoRA is supported: features that change the model in another way are rejected by name. Rank-stabilised
scaling, alpha / sqrt(r), is plain LoRA with another alpha.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.read_file import read_json
from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE, POSITIVE
from megatron.config.lora import PROJECTIONS
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import TensorFile, narrow
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.peft import ADAPTER_CONFIG, ADAPTER_FILE, adapter_table
from megatron.core.models.mapping import gather
from megatron.core.models.source import Source
from megatron.spec.lora import is_adapter

_OLD_FILE = "adapter_model.bin"
# Bookkeeping, and settings of disabled features. The modules with adapters follow from the tensors.
_HARMLESS = frozenset(
    ["auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_core"]
    + ["qalora_group_size", "exclude_modules"]
)
_STARTS = (True, "gaussian")  # values of init_lora_weights that leave the base model's weights unchanged


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
        self.model = dataclasses.replace(base, **read_adapter_config(path))
        self._file = TensorFile(path / ADAPTER_FILE)
        self.table = adapter_table(self.model)
        self.shapes = self.table.own
        entries = self._file.entries
        self.dtype: torch.dtype = next(iter(entries.values())).dtype
        for name in sorted({*self.table.theirs, *entries}):
            there = list(entries[name].shape) if name in entries else "nothing"
            called_for = list(self.table.theirs[name]) if name in self.table.theirs else "nothing"
            if there != called_for:
                raise CheckpointError(
                    f"{path / ADAPTER_FILE}: tensor {name} is {there}, and its {ADAPTER_CONFIG} requires on this model "
                    f"{called_for}; give the model that the adapter was trained on"
                )

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter; see Source."""
        return gather(self.table.of_own(name, box), box, dtype, lambda key, part: narrow(self._file.view(key), part))


class AdaptedSource:
    """A model's weights from `base` and those of its adapters from `adapter`, as one Source."""

    def __init__(self, base: Source, adapter: AdapterSource) -> None:
        self._base, self._adapter = base, adapter
        self.model = adapter.model
        self.shapes = {**base.shapes, **adapter.shapes}
        self.dtype = base.dtype

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter; see Source."""
        return (self._adapter if is_adapter(name) else self._base).read(name, box, dtype)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Returns the LoRA fields of ModelConfig that a PEFT folder describes.

    Reads its JSON and the header of its weights, without communication. Raises CheckpointError for files that are
    missing, damaged or unsupported.
    """
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
    fields = JsonFields({k: v for k, v in values.items() if v is not False and v != {} and v != []}, str(file))
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
    alpha = fields.number("lora_alpha", POSITIVE, 8)
    found = {
        "lora_rank": rank,
        "lora_alpha": alpha * math.sqrt(rank) if fields.take("use_rslora", bool, False) else alpha,
        "lora_dropout": fields.number("lora_dropout", BELOW_ONE, 0.0),
        "lora_target_modules": _projections(path, fields),
    }
    fields.finish(_HARMLESS, "only plain LoRA, the same in all layers, is supported")
    return found


def check_no_adapter(folder: Path, applied: str | None) -> None:
    """Raises CheckpointError for a model's folder with an adapter in it, which transformers would apply to the model.

    `applied` is the folder of the requested adapter.
    """
    if (folder / ADAPTER_CONFIG).is_file() and (applied is None or Path(applied).resolve() != folder.resolve()):
        raise CheckpointError(
            f"{folder} holds an adapter in addition to the model ({ADAPTER_CONFIG}), which transformers applies; give "
            f"--load-adapter {folder}, or remove that file"
        )


def _projections(path: Path, fields: JsonFields) -> tuple[str, ...]:
    """Returns the projections that have tensors. Raises CheckpointError unless they are those that the file names."""
    if not (path / ADAPTER_FILE).is_file() and (path / _OLD_FILE).exists():
        raise CheckpointError(
            f"{path} holds {_OLD_FILE}, which could run code when it is read; save the adapter again with safetensors"
        )
    entries = TensorFile(path / ADAPTER_FILE).entries
    there = {match[1] for name in entries if (match := re.search(r"\.(\w+)\.lora_[AB]\.weight$", name))}
    named = fields.take("target_modules", (list, str))
    if isinstance(named, list):
        ends = {str(name).rsplit(".", 1)[-1] for name in named}
        if unknown := sorted(ends - set(PROJECTIONS)):
            raise fields.error(
                f"target_modules names {', '.join(unknown)}; only {', '.join(PROJECTIONS)} are supported"
            )
        if ends != there:
            raise fields.error(
                f"target_modules names {', '.join(sorted(ends))}, and {ADAPTER_FILE} has tensors of "
                f"{', '.join(sorted(there)) or 'none'}"
            )
    if not there or not there <= set(PROJECTIONS):
        raise fields.error(
            f"{ADAPTER_FILE} has tensors of {', '.join(sorted(there)) or 'no projection'}; only adapters of "
            f"{', '.join(PROJECTIONS)} are supported"
        )
    return tuple(projection for projection in PROJECTIONS if projection in there)
