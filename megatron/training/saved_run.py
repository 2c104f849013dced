"""The checkpoint from which a run continues, of this program or Megatron-LM: its state and its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.config.stored import from_json
from megatron.core.dist_checkpointing.coordination import on_all, on_first
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.store import load, read_state
from megatron.core.groups import Group
from megatron.core.models.carried import check_carried_state
from megatron.core.models.mcore.source import MCoreSource
from megatron.training.megatron_lm import state_of
from megatron.training.result_state import ResultState
from megatron.training.state import TrainState

T = TypeVar("T")

MODEL_PREFIX, OPTIMIZER_PREFIX, LOAD_PREFIX, FP8_PREFIX = "model/", "optimizer/", "load/", "fp8/"
CARRIED_PREFIX = "carried/"


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
        return SavedRun(read_run_state(path), functools.partial(_fill_from_ours, path), is_foreign=False)
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
        state = read_state(path)
        check_state(path, state)
        return state
    return state_of(MCoreSource(path, None, None), None)


def stored_part(cls: type[T], state: dict[str, Any], part: str, **defaults: Any) -> T:
    """Returns a part of the configuration in a checkpoint's state, with defaults for fields that it does not hold.

    Raises CheckpointError for values that no run has saved.
    """
    try:
        values = state["config"][part]
        return from_json(cls, defaults | values if isinstance(values, dict) else values)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's configuration of the {part} is not that of a run: {error}") from error


def check_state(path: Path, state: Any) -> None:
    """Raises CheckpointError unless a state has the form in which a run saves it;
    metadata.json may have been edited."""
    try:
        config = state["config"]
        if odd := [
            part for part in ("model", "optimizer", "tokenizer", "checkpoint") if type(config[part]) is not dict
        ]:
            raise ValueError(f"the configuration of the {odd[0]} is no object")
        for name in ("train", "schedule", "layout", "rng", "optimizer", "fp8"):
            if not isinstance(state.get(name), dict | None):
                raise ValueError(f"{name} is {str(state[name])[:40]!r}, no object")
        if state["train"] is not None:
            from_json(TrainState, state["train"])
            ResultState.of(state.get("results"))
            if not isinstance(state["layout"], dict) or not all(type(n) is int for n in state["layout"].values()):
                raise ValueError("the layout consists of no sizes")
            if not isinstance(state["schedule"], dict):
                raise ValueError("a run that has trained has a schedule")
        if state["optimizer"] is not None and type(state["optimizer"]["steps"]) is not int:
            raise ValueError("the steps of the optimizer are no number")
        if state.get("fp8") is not None and not isinstance(state["fp8"]["layers"], list):
            raise ValueError("the FP8 layers are no list")
        check_carried_state(state.get("carried"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path}: its state is not that of a run: {reason}; load another checkpoint") from error


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
