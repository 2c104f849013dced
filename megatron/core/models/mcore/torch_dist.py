"""Megatron-LM's distributed checkpoints (--ckpt-format torch_dist): global tensors of the model, and objects.

Names are the model's own; those of all layers may be one tensor with a leading dim of layers
(`decoder.layers.mlp.linear_fc2.weight` [layers, h, f]). Gate and up may be two tensors, with `_w` and `_v` after the
name.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box, intersect
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.dcp_folder import DcpFolder
from megatron.core.dist_checkpointing.pickles import load_objects
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.names import FUSED_NORM, CheckpointLayout

COMMON_FILE = "common.pt"  # until core 0.18, which stores an object instead
_COMMON = "common_state"
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.*)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
# Before core 0.14 the optimizers of a model with experts had numbers: all but the experts, and the experts.
OPTIMIZERS = ("optimizer.", "chained_0.optimizer.", "chained_1.optimizer.")
_HALVES = ("_w", "_v")


class ModelSpace:
    """Tensors of a folder whose names begin with `prefix`, by the names of the model's parameters.

    `shapes` maps names to shapes. A tensor of optimizer state may have another shape: see `read`.
    """

    def __init__(self, folder: DcpFolder, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stored, (shape, _) in folder.tensors.items():
            if not stored.startswith(prefix) or (not prefix and stored.startswith(OPTIMIZERS)):
                continue
            name = stored.removeprefix(prefix)
            if match := _STACKED.fullmatch(name):
                for layer in range(shape[0]):
                    self._add(f"{match[1]}{layer}.{match[2]}", shape[1:])
            else:
                self._add(name, shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        if name.endswith(_HALVES) and ".linear_fc1." in name:
            name, shape = name[:-2], (2 * shape[0], *shape[1:])
        self.shapes[name] = shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        stored, _ = self._stored(name)
        return self._folder.tensors[stored if stored in self._folder.tensors else stored + _HALVES[0]][1]

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Returns elements `box` of the tensor of a parameter of `shape`. Raises CheckpointError."""
        if name not in self.shapes:
            raise CheckpointError(f"it holds no tensor {self._prefix}{name}")
        stored, layer = self._stored(name)
        if stored in self._folder.tensors:
            return self._read(stored, layer, shape, box)
        half = (shape[0] // 2, *shape[1:])
        out = torch.empty(box.shape, dtype=self.dtype(name))
        for number, ending in enumerate(_HALVES):
            part = Box((number * half[0], *(0 for _ in half[1:])), half)
            if common := intersect(part, box):
                narrow(out, common.within(box)).copy_(self._read(stored + ending, layer, half, common.within(part)))
        return out

    def _stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns the stored name, and the index of the layer in that tensor: () for a tensor of this layer alone."""
        tensors = self._folder.tensors
        stored_name = self._prefix + name
        match = _LAYER.fullmatch(name)
        if stored_name in tensors or stored_name + _HALVES[0] in tensors or match is None:
            return stored_name, ()
        return f"{self._prefix}{match[1]}{match[3]}", (int(match[2]),)

    def _read(self, stored: str, layer: tuple[int, ...], shape: tuple[int, ...], box: Box) -> Tensor:
        ones = tuple(1 for _ in layer)
        saved = self._folder.tensors[stored][0][len(layer) :]
        if saved == shape:
            return self._folder.read(stored, Box((*layer, *box.offset), (*ones, *box.shape))).view(box.shape)
        if len(saved) == len(shape) + 1:
            return self._read_fragments(stored, layer, saved, shape, box)
        raise CheckpointError(f"tensor {stored} is {list(saved)}, its model requires {list(shape)}")

    def _read_fragments(
        self, stored: str, layer: tuple[int, ...], saved: tuple[int, ...], shape: tuple[int, ...], box: Box
    ) -> Tensor:
        """Reads state that core up to 0.13 split over ranks: [n1, n2, ..., elements], n fragments of each dim,
        flattened.
        """
        counts = saved[:-1]
        size = tuple(n // count for n, count in zip(shape, counts, strict=True))
        if any(n % count for n, count in zip(shape, counts, strict=True)) or math.prod(size) != saved[-1]:
            raise CheckpointError(f"tensor {stored} is {list(saved)}, which are no fragments of {list(shape)}")
        ones = tuple(1 for _ in layer)
        out = torch.empty(box.shape, dtype=self._folder.tensors[stored][1])
        for number in range(math.prod(counts)):
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), counts))
            fragment = Box(tuple(i * n for i, n in zip(place, size, strict=True)), size)
            if common := intersect(fragment, box):
                flat = self._folder.read(stored, Box((*layer, *place, 0), (*ones, *(1 for _ in place), saved[-1])))
                narrow(out, common.within(box)).copy_(narrow(flat.view(size), common.within(fragment)))
        return out


class TorchDistFiles:
    """The weights of a torch_dist folder, under the keys of one rank. See ClassicFiles for its fields."""

    def __init__(self, path: Path) -> None:
        """Opens the folder. Raises CheckpointError."""
        self.path = path
        self.folder = DcpFolder(path)
        self.common = self._read_common()
        namespace = self.common.get("args")
        self.arguments: dict[str, Any] = vars(namespace) if isinstance(namespace, argparse.Namespace) else {}
        if not self.arguments:
            raise CheckpointError(f"{path} holds no arguments; it is not a checkpoint of Megatron-LM's training")
        self._weights = ModelSpace(self.folder, "")
        self._beginning = CheckpointLayout(1, 1, (0,), True, 0).key(0, 0, 0, "")
        self.shapes = {self._beginning + name: shape for name, shape in self._weights.shapes.items()}
        self.layout = self._layout()

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor of the model."""
        return self._weights.dtype(self.name(key))

    def read(self, key: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Returns elements `box` of a tensor of the model, which has `shape`."""
        return self._weights.read(self.name(key), shape, box)

    def name(self, key: str) -> str:
        """Returns the parameter's name in the whole model."""
        return key.removeprefix(self._beginning)

    def has_tensors(self, *beginnings: str) -> bool:
        """Returns whether there is a tensor whose name begins with one of `beginnings`."""
        return any(name.startswith(beginnings) for name in self.folder.tensors)

    def read_object(self, name: str) -> Any:
        """Returns the object of that name, without its shard index, or None."""
        stored = f"{name}/shard_0_1"
        if stored not in self.folder.objects:
            return None
        content = self.folder.read_object(stored)
        return content[0] if isinstance(content, list) and content else content

    def _read_common(self) -> Mapping[str, Any]:
        file = self.path / COMMON_FILE
        common = load_objects(file, str(file)) if file.is_file() else self.read_object(_COMMON)
        if common is None:
            raise CheckpointError(f"{self.path} holds neither {COMMON_FILE} nor the object {_COMMON}: it is damaged")
        if not isinstance(common, dict):
            raise CheckpointError(f"{self.path}: its common state is not a table of values")
        return common

    def _layout(self) -> CheckpointLayout:
        names = self._weights.shapes
        layers = {match[2] for name in names if (match := _LAYER.fullmatch(name))}
        embedding = names.get("embedding.word_embeddings.weight", ())
        if not embedding:
            raise CheckpointError(f"{self.path} holds no tensor embedding.word_embeddings.weight")
        fused = any(name.endswith(FUSED_NORM) for name in names)
        routers = [name for name in names if name.endswith(".mlp.router.weight")]
        norms = {name.replace(".router.weight", f".linear_fc1{FUSED_NORM}") for name in routers}
        return CheckpointLayout(
            1,
            1,
            (len(layers),),
            fused,
            embedding[0],
            fused_expert_norms=not norms.isdisjoint(names),
            splits_delta_nets=True,
        )
