"""The checkpoint from which a run continues, of this program or Megatron-LM: its state and its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.coordination import on_all, on_first
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.store import load, read_state
from megatron.core.groups import Group
from megatron.core.models.mcore.source import MCoreSource
from megatron.training.megatron_lm import state_of

MODEL_PREFIX, OPTIMIZER_PREFIX, LOAD_PREFIX, FP8_PREFIX = "model/", "optimizer/", "load/", "fp8/"


@dataclass(frozen=True)
class SavedRun:
    """A saved run. For `state` see checkpoint.py. `fill` copies the saved elements into the pieces' data.

    `fill` is collective over the group and raises CheckpointError on all ranks.
    """

    state: dict[str, Any]
    fill: Callable[[Sequence[ShardedTensor], Group], None]
    is_foreign: bool


def open_saved_run(path: Path, model: ModelConfig, group: Group) -> SavedRun:
    """Opens the checkpoint in `path` for a run of `model`. Collective over the group; raises CheckpointError on all
    ranks.
    """
    if not is_foreign(path):
        return SavedRun(read_state(path), functools.partial(_fill_from_ours, path), is_foreign=False)
    opened: list[tuple[MCoreSource, dict[str, Any]]] = []

    def open_it() -> None:
        source = MCoreSource(path, None, None)
        opened.append((source, state_of(source, model.vocab_size)))

    _first_then_all(group, "checkpoint state", open_it)
    source, state = opened[0]
    return SavedRun(state, functools.partial(_fill_from_megatron_lm, source), is_foreign=True)


def read_run_state(path: Path) -> dict[str, Any]:
    """Returns the state alone. A vocabulary of unknown size is None. No communication. Raises CheckpointError."""
    if not is_foreign(path):
        return read_state(path)
    return state_of(MCoreSource(path, None, None), None)


def _fill_from_ours(path: Path, tensors: Sequence[ShardedTensor], group: Group) -> None:
    load(path, tensors, group=group)


def _fill_from_megatron_lm(source: MCoreSource, tensors: Sequence[ShardedTensor], group: Group) -> None:
    def fill() -> None:
        for tensor in tensors:
            tensor.data.copy_(_read(source, tensor))

    if any(tensor.name.startswith(OPTIMIZER_PREFIX) for tensor in tensors):
        _first_then_all(group, "checkpoint optimizer", source.open_optimizer)
    on_all(group, "checkpoint read", fill)


def _first_then_all(group: Group, step: str, run: Callable[[], None]) -> None:
    """Runs on the first rank before the others, so that an error common to all ranks is reported by one."""
    on_first(group, step, run)
    on_all(group, step, run if group.rank else lambda: None)


def _read(source: MCoreSource, tensor: ShardedTensor) -> Any:
    kind, _, name = tensor.name.partition("/")
    key = None
    if f"{kind}/" == OPTIMIZER_PREFIX:
        name, _, key = name.rpartition("/")
    if source.shapes.get(name) != tensor.global_shape:
        raise CheckpointError(
            f"{source.path} holds {name} as {list(source.shapes.get(name, ()))}, this run has it as "
            f"{list(tensor.global_shape)}"
        )
    if key is None:
        return source.read(name, tensor.box, tensor.data.dtype)
    return source.read_state(name, key, tensor.box)
