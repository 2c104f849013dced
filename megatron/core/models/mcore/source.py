"""Reads Megatron-LM's checkpoints, of both formats and any layout: weights and training state.

Pickles are read as data (core/dist_checkpointing/pickles.py): none of their code is run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.update_rules import ADAM, SGD
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.mapping import Table, gather
from megatron.core.models.mcore.arguments import model_of
from megatron.core.models.mcore.classic import ClassicFiles
from megatron.core.models.mcore.flat_state import GROUP, of_buckets, of_files, of_gathered
from megatron.core.models.mcore.folder import CLASSIC, format_of, iteration_folder
from megatron.core.models.mcore.names import table
from megatron.core.models.mcore.optimizer_state import SAVE_ADVICE, ListState, ModelState, OptimizerState, optimizers_of
from megatron.core.models.mcore.torch_dist import OPTIMIZERS, TorchDistFiles
from megatron.core.models.mcore.zero_centered import MASTER, is_zero_centered

_OPTIMIZERS = (ADAM, SGD)  # whose state files are known


class MCoreSource:
    """A Source of a Megatron-LM checkpoint.

    `layout` is the sharding of its weights. `arguments` are those of the run that wrote it. `common` holds all values
    other than tensors.
    """

    def __init__(self, root: Path, step: int | None, vocab_size: int | None, ignored: Sequence[str] = ()) -> None:
        """Opens the folder with the tracker, or the folder of one iteration.

        For `vocab_size` and `ignored` see arguments.py. Raises CheckpointError, and ConfigError for a name that cannot
        be ignored.
        """
        self.path = iteration_folder(root, step)
        is_classic = format_of(self.path) == CLASSIC
        self._files: ClassicFiles | TorchDistFiles = (
            ClassicFiles(self.path) if is_classic else TorchDistFiles(self.path)
        )
        self.arguments, self.common = self._files.arguments, self._files.common
        self.model = model_of(self.arguments, str(self.path), vocab_size, ignored)
        self.layout = self._files.layout
        assert self.model.vocab_size
        rows = self.layout.tp * self.layout.vocabulary
        if self.model.vocab_size > rows:
            raise CheckpointError(
                f"{self.path} holds {rows} rows of the vocabulary, fewer than its {self.model.vocab_size} ids"
            )
        self.model = dataclasses.replace(self.model, fixed_padded_vocab_size=rows)
        layers = sum(self.layout.layers)
        if layers != self.model.num_layers:
            raise CheckpointError(f"{self.path} holds {layers} layers, its arguments say {self.model.num_layers}")
        self.table = table(self.model, self.layout)
        self._check()
        self.shapes = self.table.ours
        self.dtype = self._files.dtype(next(iter(self.table.theirs)))
        self.carried = CarriedTensors()
        self._verified: set[tuple[str, Box]] = set()

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter, see core/models/source.py. Missing rows of the vocabulary are zero."""
        if is_zero_centered(self.model, name):
            return (self._read_stored(name, box, torch.float32) + 1.0).to(dtype)
        return self._read_stored(name, box, dtype)

    def _read_stored(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        def read(key: str, part: Box) -> Tensor:
            return self._files.read(key, self.layout.full_shape(key, self.table.theirs[key]), part)

        return gather(self.table.of_ours(name, box), box, dtype, read)

    def read_state(self, name: str, key: str, box: Box) -> Tensor:
        """Returns elements `box` of the optimizer's state `key` of parameter `name`, in fp32: "master", "exp_avg" and
        so on.

        If the owners of a buffer's elements were derived, the fp32 weights in it must round to the weights. Raises
        CheckpointError.
        """
        state = self._state[0]
        if state.derived and state.has_masters and (name, box) not in self._verified:
            master = self._read_state(name, MASTER, box)
            if not torch.equal(master.to(self.dtype), self._read_stored(name, box, self.dtype)):
                raise CheckpointError(
                    f"{self.path}: the fp32 weights in its optimizer do not round to {name}; {SAVE_ADVICE}"
                )
            self._verified.add((name, box))
        values = self._read_state(name, key, box)
        return values + 1.0 if key == MASTER and is_zero_centered(self.model, name) else values

    def open_optimizer(self) -> None:
        """Raises CheckpointError for a state of the optimizer that cannot be read."""
        _ = self._state

    @property
    def has_optimizer(self) -> bool:
        """Returns whether the checkpoint holds any optimizer state."""
        files = self._files
        return (
            "optimizer" in self.common
            if isinstance(files, ClassicFiles)
            else files.has_tensors(*OPTIMIZERS)
            or any(name.startswith((GROUP, *OPTIMIZERS[1:])) for name in files.folder.objects)
        )

    def optimizer_part(self, name: str) -> Any:
        """Returns "optimizer" (groups and unsharded state) or "grad_scaler"; None if there is none."""
        optimizers = optimizers_of(self.common.get("optimizer", {}))
        if isinstance(files := self._files, TorchDistFiles):
            for chain in ("", "chained_0."):
                if (content := files.read_object(f"{chain}{GROUP}0.{name}")) is not None:
                    return content
        if name != "optimizer":
            return optimizers[0].get(name)
        held = [optimizer if "param_groups" in optimizer else optimizer.get(name, {}) for optimizer in optimizers]
        if len(held) == 1:
            return held[0]
        return {**held[0], "param_groups": [group for part in held for group in part.get("param_groups", ())]}

    def _read_state(self, name: str, key: str, box: Box) -> Tensor:
        state, names = self._state

        def read(theirs: str, part: Box) -> Tensor:
            return state.read(key, theirs, state.layout.full_shape(theirs, names.theirs[theirs]), part)

        return gather(names.of_ours(name, box), box, torch.float32, read)

    @functools.cached_property
    def _state(self) -> tuple[OptimizerState, Table]:
        """Returns the state of the optimizer, and the names of its parameters. Raises CheckpointError."""
        rule = self.arguments.get("optimizer", ADAM)
        if rule not in _OPTIMIZERS:
            raise CheckpointError(
                f"{self.path} holds the state of optimizer {rule!r}, which is not read; {SAVE_ADVICE}"
            )
        state = self._open_state()
        return state, table(self.model, state.layout)

    def _open_state(self) -> OptimizerState:
        files = self._files
        distributed = bool(self.arguments.get("use_distributed_optimizer"))
        if isinstance(files, ClassicFiles) and not distributed:
            return ListState(files)
        if isinstance(files, TorchDistFiles) and files.has_tensors(*(f"{prefix}state." for prefix in OPTIMIZERS)):
            return ModelState(files)
        if isinstance(files, TorchDistFiles) and files.has_tensors(GROUP, f"chained_0.{GROUP}"):
            return of_buckets(files, self.model)
        if self.model.num_experts is not None:
            raise CheckpointError(
                f"{self.path} holds the optimizer of a model with experts in a form that is read of dense models only; "
                f"{SAVE_ADVICE}"
            )
        if isinstance(files, ClassicFiles):
            return of_files(files, self.model)
        if f"{GROUP}0.param_state/shard_0_1" in files.folder.objects:
            return of_gathered(files, self.model)
        raise CheckpointError(f"{self.path} holds the optimizer's state in a form that is not known; {SAVE_ADVICE}")

    def _check(self) -> None:
        """Checks that every tensor exists in the right shape, and that there are no others."""
        shapes = self._files.shapes
        for key in self.table.theirs:
            expected = self.layout.full_shape(key, self.table.theirs[key])
            if key not in shapes:
                folder, part, name = key.split("/", 2)
                raise CheckpointError(
                    f"{self.path}/{folder}: {part} holds no tensor {name}, which its arguments require"
                )
            if shapes[key] != expected:
                raise CheckpointError(
                    f"{self.path}: {key} is {list(shapes[key])}, its arguments require {list(expected)}"
                )
        for key in shapes:
            if key not in self.table.theirs and not _is_spare(key.split("/", 2)[2]):
                raise CheckpointError(f"{self.path}: unknown tensor {key}; the model has a part that is not known")


def _is_spare(name: str) -> bool:
    """Returns whether this is state of Transformer Engine, or the last stage's copy of a tied embedding."""
    return "_extra_state" in name or name == "output_layer.weight" or "rotary_pos_emb" in name
