"""Optimizer state in the forms of Megatron-LM's checkpoints, each read as tensors of the model's parameters.

- `ModelState`: global tensors of torch_dist, of `fully_reshardable`, `fully_sharded_model_space` and the optimizer that
  is not distributed.
- `BucketState`: flat buffers of every rank: `dp_reshardable` and `dp_zero_gather_scatter` of torch_dist, and
  distrib_optim.pt of the classic layout. The positions of the parameters are not stored but derived; see buckets.py.
- `ListState`: the optimizer of the classic layout that is not distributed: lists in the order of its groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.buckets import place
from megatron.core.models.mcore.classic import FILE, ClassicFiles
from megatron.core.models.mcore.names import CheckpointLayout, Shape, is_expert
from megatron.core.models.mcore.torch_dist import OPTIMIZERS, ModelSpace, TorchDistFiles

SAVE_ADVICE = (
    "save it from Megatron-LM with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or take the weights "
    "alone with --no-load-optim"
)
_MASTERS = ("param", "fp32_param")


class OptimizerState(Protocol):
    """The optimizer state of a checkpoint's parameters.

    `layout` is that of the Table that names the parameters. `derived` means that the owner of each element was derived
    and not stored. `has_masters` means that fp32 weights are part of the state.
    """

    layout: CheckpointLayout
    derived: bool
    has_masters: bool

    def read(self, key: str, name: str, shape: Shape, box: Box) -> Tensor:
        """Returns elements `box` of the state `key` ("master", "exp_avg" ...) of a parameter, which has `shape` on its
        rank.

        `name` is in the format of `CheckpointLayout.key`. Raises CheckpointError.
        """
        ...


class ModelState:
    """State stored as global tensors of torch_dist, see the module."""

    derived = False

    def __init__(self, files: TorchDistFiles) -> None:
        self.layout = files.layout
        self._files = files
        self._spaces: dict[str, list[ModelSpace]] = {}
        masters = [name for name in _MASTERS if files.has_tensors(*_prefixes(name))]
        self.has_masters = bool(masters)
        self._master = masters[0] if masters else _MASTERS[0]

    def read(self, key: str, name: str, shape: Shape, box: Box) -> Tensor:
        """See OptimizerState."""
        theirs, parameter = self._master if key == "master" else key, self._files.name(name)
        if theirs not in self._spaces:
            self._spaces[theirs] = [ModelSpace(self._files.folder, prefix) for prefix in _prefixes(theirs)]
        spaces = self._spaces[theirs]
        return next((space for space in spaces if parameter in space.shapes), spaces[0]).read(parameter, shape, box)


class BucketState:
    """State stored in flat buffers, one per tp rank and chunk of the model; see the module."""

    derived, has_masters = True, True

    def __init__(
        self,
        layout: CheckpointLayout,
        numels: Callable[[int, int], Mapping[str, int]],
        buckets: Callable[[int, int, Mapping[str, int]], Sequence[int]],
        fetch: Callable[[int, int, str, int, Box], Tensor],
        holders: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Derives the position of every parameter. Raises CheckpointError.

        `numels(rank, chunk)` returns the elements of the parameters in the order of modules; `buckets(rank, chunk,
        numels)` returns the sizes of the buckets of their buffer; `fetch(rank, chunk, key, bucket, range)` returns
        elements of one bucket. A rank here is one of tp, or an index of `holders`: (tp rank, ep rank) in the names of
        the parameters of each buffer.
        """
        self.layout, self._fetch = layout, fetch
        self._places: dict[str, tuple[int, int, int, int]] = {}
        for rank, holder in enumerate(holders or [(tp_rank, 0) for tp_rank in range(layout.tp)]):
            for chunk in range(len(layout.layers)):
                held = numels(rank, chunk)
                sizes = buckets(rank, chunk, held)
                places = place(held, sizes)
                if places is None:
                    raise CheckpointError(
                        f"the optimizer's buckets of tp rank {rank}, chunk {chunk} have {list(sizes)} elements, which "
                        f"its {len(held)} parameters do not fill; {SAVE_ADVICE}"
                    )
                for name, (bucket, start) in places.items():
                    self._places[layout.key(*holder, chunk, name)] = (rank, chunk, bucket, start)

    def read(self, key: str, name: str, shape: Shape, box: Box) -> Tensor:
        """See OptimizerState."""
        rank, chunk, bucket, start = self._places[name]
        row = math.prod(shape[1:])
        flat = Box((start + box.offset[0] * row,), (box.shape[0] * row,))
        rows = self._fetch(rank, chunk, "param" if key == "master" else key, bucket, flat).view(
            box.shape[0], *shape[1:]
        )
        return narrow(rows, Box((0, *box.offset[1:]), box.shape))


class ListState:
    """State stored in lists of the classic layout, see the module."""

    derived = True

    def __init__(self, files: ClassicFiles) -> None:
        """Reads the state of all ranks. Raises CheckpointError."""
        self.layout = files.layout
        self._files, self._tensors = files, dict[str, dict[str, Tensor]]()
        for folder in (
            self.layout.folder(*rank, stage) for rank in self.layout.ranks for stage in range(self.layout.pp)
        ):
            parameters, optimizers = files.parameters(folder), optimizers_of(files.rank(folder)["optimizer"])
            if len(optimizers) == 1:
                self._take(files, folder, optimizers[0], parameters)
                continue
            for of_experts, optimizer in zip((False, True), optimizers, strict=True):
                names = [name for name in parameters if is_expert(name) == of_experts]
                self._take(files, folder, optimizer, names)
        self.has_masters = any("master" in held for held in self._tensors.values())

    def read(self, key: str, name: str, shape: Shape, box: Box) -> Tensor:
        """See OptimizerState."""
        if key not in self._tensors.get(name, {}):
            raise CheckpointError(f"its optimizer holds no {key} of {name}; {SAVE_ADVICE}")
        tensor = self._tensors[name][key]
        self._files.check(self._files.path / name.partition("/")[0] / FILE, tensor)
        return narrow(tensor, box)

    def _take(self, files: ClassicFiles, folder: str, outer: Mapping[str, Any], parameters: list[str]) -> None:
        inner = outer.get("optimizer", outer)
        masters = outer.get("fp32_from_fp16_params", outer.get("fp32_from_fp16"))
        kinds = {name: _kind(name, files.shapes[name], files.arguments) for name in parameters}
        for number, group in enumerate(inner["param_groups"]):
            kind = group.get("wd_mult", 1.0) != 0, _is_decoupled(group)
            names = [name for name in parameters if kinds[name] == kind]
            if len(names) != len(group["params"]):
                raise CheckpointError(
                    f"group {number} of the optimizer in {folder} has {len(group['params'])} parameters where its "
                    f"model has {len(names)}; {SAVE_ADVICE}"
                )
            for position, (name, identity) in enumerate(zip(names, group["params"], strict=True)):
                held = {key: tensor for key, tensor in inner["state"].get(identity, {}).items() if key != "step"}
                if masters is not None:
                    held["master"] = masters[number][position]
                for key, tensor in held.items():
                    if tuple(tensor.shape) != files.shapes[name]:
                        raise CheckpointError(
                            f"the optimizer's {key} of {name} is {list(tensor.shape)}, its weight "
                            f"{list(files.shapes[name])}; {SAVE_ADVICE}"
                        )
                self._tensors[name] = held


def optimizers_of(value: Any) -> list[Mapping[str, Any]]:
    """Returns the only optimizer of a value, or the two of a model whose experts are shared over ep: that of the
    experts is the second. They are in a list, or numbered. Raises CheckpointError.
    """
    if isinstance(value, dict) and set(value) == {0, 1}:
        value = [value[0], value[1]]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(optimizer, dict) for optimizer in value):
        return value
    return [only(value)]


def only(optimizer: Any) -> Mapping[str, Any]:
    """Returns the only optimizer of a value that may be a list of them. Raises CheckpointError."""
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if not isinstance(optimizer, dict):
        raise CheckpointError(f"it holds the state of several optimizers, which is not supported; {SAVE_ADVICE}")
    return optimizer


def _prefixes(key: str) -> list[str]:
    return [f"{optimizer}state.{key}." for optimizer in OPTIMIZERS]


def _kind(name: str, shape: Shape, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns (weight decay applies, the learning rate is the decoupled one), as Megatron-LM groups parameters."""
    of_heads = "q_layernorm." in name or "k_layernorm." in name
    decays = not (name.endswith(".bias") or len(shape) == 1)
    is_end = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    return (
        decays or (of_heads and bool(arguments.get("apply_wd_to_qk_layernorm"))),
        is_end and arguments.get("decoupled_lr") is not None,
    )


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    """Returns whether a group has the decoupled learning rate, which older versions stored explicitly."""
    return bool(group.get("is_decoupled_lr", False)) or not group.get("default_config", True)
