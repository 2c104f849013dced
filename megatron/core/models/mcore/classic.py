"""Megatron-LM's classic layout (--ckpt-format torch): one folder mp_rank_XX[_YYY] per rank, with model_optim_rng.pt."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.pickles import load_objects
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.names import CheckpointLayout

FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MODEL = re.compile(r"model\d*")


class ClassicFiles:
    """The weights of all ranks; tensors are mapped, and read on demand.

    `shapes` maps the key of every tensor of the model, in the format of `CheckpointLayout.key`, to its shape. `common`
    holds the first rank's values except its weights. `arguments` are those of the run that wrote the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        ranks = _ranks(path)
        tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
        if set(ranks) != {(t, p) for t in range(tp) for p in range(pp)}:
            raise CheckpointError(f"{path} holds {len(ranks)} folders mp_rank_..., tp {tp} x pp {pp} need {tp * pp}")
        self._files = {folder.name: _load(folder / FILE) for folder in ranks.values()}
        self.common: Mapping[str, Any] = self._files[ranks[0, 0].name]
        found = self.common.get("args")
        self.arguments: dict[str, Any] = vars(found) if isinstance(found, argparse.Namespace) else {}
        if not self.arguments:
            raise CheckpointError(
                f"{ranks[0, 0] / FILE} holds no arguments; it is not a checkpoint of Megatron-LM's training"
            )
        self.shapes = {
            f"{folder}/{part}/{name}": tuple(value.shape)
            for folder, content in self._files.items()
            for part in content
            if _MODEL.fullmatch(part)
            for name, value in content[part].items()
            if isinstance(value, Tensor)
        }
        self.layout = self._layout(tp, pp)

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor of the model."""
        return self._tensor(key).dtype

    def read(self, key: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Returns elements `box` of a tensor of the model, which has `shape`."""
        return narrow(self._tensor(key), box)

    def rank(self, folder: str) -> Mapping[str, Any]:
        """Returns the content of the file of the rank with this folder."""
        return self._files[folder]

    def parameters(self, folder: str) -> list[str]:
        """Returns the keys of a rank's parameters in the order of its modules, chunk by chunk, as in its optimizer."""
        parts = sorted(part for part in self._files[folder] if _MODEL.fullmatch(part))
        keys = [f"{folder}/{part}/{name}" for part in parts for name in self._files[folder][part]]
        return [key for key in keys if key in self.shapes and "rotary_pos_emb" not in key]

    def _tensor(self, key: str) -> Tensor:
        folder, part, name = key.split("/", 2)
        found: Tensor = self._files[folder][part][name]
        return found

    def _layout(self, tp: int, pp: int) -> CheckpointLayout:
        chunks = max(1, sum(bool(re.fullmatch(r"model\d+", key)) for key in self.common))
        shape = CheckpointLayout(tp, pp, (0,) * pp * chunks, True, 0)
        held: list[set[str]] = []
        for chunk in range(pp * chunks):
            beginning = shape.key(0, chunk, "")
            held.append({key.removeprefix(beginning) for key in self.shapes if key.startswith(beginning)})
        layers = tuple(len({match[1] for name in names if (match := _LAYER.match(name))}) for names in held)
        fused = any(name.endswith("linear_qkv.layer_norm_weight") for names in held for name in names)
        # The padding of the rows is not always among the arguments.
        embedding = self.shapes.get(shape.key(0, 0, "embedding.word_embeddings.weight"))
        if embedding is None:
            place = shape.key(0, 0, "").rstrip("/")
            raise CheckpointError(f"{self.path}/{place} holds no tensor embedding.word_embeddings.weight")
        return CheckpointLayout(tp, pp, layers, fused, embedding[0] if embedding else 0)


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in folder.glob("mp_rank_*"):
        match = _RANK.fullmatch(path.name)
        if match and match[3]:
            raise CheckpointError(f"{path} belongs to expert parallelism, which is not supported")
        if match:
            found[int(match[1]), int(match[2] or 0)] = path
    return found


def _load(path: Path) -> dict[str, Any]:
    content = load_objects(path, str(path), mapped=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint of Megatron-LM")
    return content
