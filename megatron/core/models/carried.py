"""Tensors of a Hugging Face folder that a run does not train: they are kept, and written back as they were.

They are the indexer of sparse attention, layers that predict further tokens in a run without them, and the parts of a
model that see images. No rank holds them in memory: a checkpoint has them under the names of the folder, and whoever
writes reads one of them after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box


@dataclass(frozen=True)
class CarriedTensor:
    """`read(box)` returns elements of the tensor, possibly in memory that is mapped from a file: do not write to it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]

    def whole(self) -> Tensor:
        """Returns all elements, as `read` does."""
        return self.read(Box((0,) * len(self.shape), self.shape))


@dataclass(frozen=True)
class CarriedTensors:
    """tensors: by their names in the folder. config: its config.json. prefix: what the names of the language model's
    tensors begin with in a folder that also holds a model for images, see `folder_name`; otherwise empty.
    """

    tensors: Mapping[str, CarriedTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(Box(t.shape, t.shape).numel * t.dtype.itemsize for t in self.tensors.values())

    def state(self) -> dict[str, Any] | None:
        """Returns what a checkpoint keeps besides the tensors, as JSON."""
        return {"config": dict(self.config), "prefix": self.prefix} if self.tensors else None


def check_carried_state(state: Any) -> None:
    """Raises ValueError unless a value is one that `CarriedTensors.state` returns."""
    if state is None:
        return
    if not isinstance(state, dict) or not isinstance(state.get("config"), dict):
        raise ValueError(f"carried is {json.dumps(state)[:40]}, which has no config")
    if state.get("prefix") not in PREFIXES:
        raise ValueError(f"the names of carried tensors have the prefix {state.get('prefix')!r}")


# In a folder for language and images: on the hub, and as transformers has the names in memory.
ON_HUB, IN_MEMORY = "language_model.", "model.language_model."
PREFIXES = ("", ON_HUB, IN_MEMORY)
_HEAD = "lm_head.weight"


def decoder_name(key: str) -> str | None:
    """The name that a tensor of a language model in a folder with images has alone; None for one of another part."""
    for prefix, name in ((ON_HUB, ""), (IN_MEMORY, "model.")):
        if key.startswith(prefix):
            return name + key.removeprefix(prefix)
    return key if key == _HEAD else None


def folder_name(name: str, prefix: str) -> str:
    """The inverse of `decoder_name`: the name of a language model's tensor in a folder whose names have this prefix."""
    if prefix == IN_MEMORY:
        return name if name == _HEAD else prefix + name.removeprefix("model.")
    return prefix + name
