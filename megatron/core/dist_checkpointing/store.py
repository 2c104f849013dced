"""Saves and loads checkpoints of global tensors, under any layout. How a save proceeds is in pending_save.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint.state_dict_loader as dcp_loader

from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.coordination import on_all, on_first, patient, through_dcp
from megatron.core.dist_checkpointing.folders import folder_name, iterations
from megatron.core.dist_checkpointing.local_folders import is_local
from megatron.core.dist_checkpointing.local_load import LocalReader, files_of_ranks
from megatron.core.dist_checkpointing.manifest import Manifest, check_sizes, read_manifest
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.core.dist_checkpointing.planner import ShardedLoadPlanner, by_name
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.storage import SafetensorsReader, verify_files
from megatron.core.dist_checkpointing.tensor_file import DamagedError
from megatron.core.groups import Group


def save(
    root: Path,
    iteration: int,
    tensors: Sequence[ShardedTensor],
    state: dict[str, Any],
    *,
    group: Group,
    keep: int | None,
) -> Path:
    """Saves `tensors` and the first rank's `state` (any JSON) as `root`/iter_0000100 and returns that folder.

    `root` is on a file system that all ranks of `group` share. An existing checkpoint of this iteration is replaced.
    `keep`: delete all but this many checkpoints afterwards; None keeps all. Collective over `group`: plans are sent to
    its first rank and back as objects, tensors are not communicated, because each rank writes its own pieces. Raises
    CheckpointError on all ranks, with the rank and the cause, if any rank fails; older checkpoints and the tracker are
    then unchanged.
    """
    return PendingSave(root, iteration, tensors, state, group=group, keep=keep).finish()


def load(path: Path, tensors: Sequence[ShardedTensor], *, group: Group) -> dict[str, Any]:
    """Fills the pieces' `data` in place from the checkpoint in folder `path` and returns the state saved with it.

    The layout may differ from that of the save; saved tensors that no piece asks for are not read. A tensor's global
    shape and dtype must be those saved. Collective over `group`: small objects only. Raises CheckpointError on all
    ranks, possibly after filling some pieces: a tensor that does not fit is named with both shapes; for a damaged file
    the message also names an earlier iteration that is complete.

    `path` may be this rank's folder of a local checkpoint. Tensors of files that it does not see are then sent by ranks
    that see them.
    """
    if is_local(path):
        return _load_local(path, tensors, group)
    try:
        with patient(group):
            first = on_first(group, "checkpoint sizes", lambda: _check(path))
            manifest = on_all(group, "checkpoint metadata", lambda: _read_same(path, first))
            _read(tensors, SafetensorsReader(path, manifest, group.heartbeat.working), group)
    except DamagedError as error:
        raise DamagedError(f"cannot load {path}: {error}; {_advice(path, group)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {path}: {error}") from error
    return manifest.state


def read_state(path: Path) -> dict[str, Any]:
    """Returns the state saved with the checkpoint in folder `path`. No communication. Raises CheckpointError.

    For a damaged metadata.json the message names the newest earlier iteration that has all its files, without reading
    them.
    """
    try:
        return read_manifest(path).state
    except DamagedError as error:
        candidates = _newest_first(path.parent, _number(path))
        complete = next((i for i in candidates if _has_all_files(path.parent / folder_name(i))), None)
        advice = "no earlier checkpoint is complete" if complete is None else f"try --ckpt-step {complete}"
        raise DamagedError(f"cannot load {path}: {error}; {advice}") from error


def verify(path: Path) -> None:
    """Reads the whole checkpoint in folder `path`. No communication.
    Raises DamagedError naming the first damaged file."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    verify_files(path, manifest, sorted(manifest.files))


def newest_whole(root: Path, *, before: int | None, group: Group) -> int | None:
    """Returns the newest iteration (before `before`) whose files are all undamaged, or None.

    Collective over `group`: its ranks share the work of reading each candidate in full.
    """
    candidates = on_first(group, "checkpoint list", lambda: _newest_first(root, before))
    return next((iteration for iteration in candidates if _is_whole(root, iteration, group)), None)


def _load_local(path: Path, tensors: Sequence[ShardedTensor], group: Group) -> dict[str, Any]:
    try:
        with patient(group):
            manifest = on_all(group, "checkpoint metadata", lambda: read_manifest(path))
            files, holders = files_of_ranks(path, manifest, group)
            _read(tensors, LocalReader(path, manifest, group, files, holders), group)
    except CheckpointError as error:
        raise CheckpointError(f"cannot load the local checkpoint {path.name}: {error}") from error
    return manifest.state


def _read(tensors: Sequence[ShardedTensor], reader: SafetensorsReader, group: Group) -> None:
    def run() -> None:
        dcp_loader.load(
            by_name(tensors),
            storage_reader=reader,
            planner=ShardedLoadPlanner(),
            process_group=group.process_group,
            no_dist=group.process_group is None,
        )

    through_dcp(group, "checkpoint read", run)


def _check(path: Path) -> str:
    check_sizes(path, read_manifest(path))
    return path.name


def _read_same(path: Path, first: str) -> Manifest:
    if path.name != first:  # a shared file system may show a new tracker to some hosts later than to others
        raise CheckpointError(f"the first rank loads {first}, this rank {path.name}; start again or pass --ckpt-step")
    return read_manifest(path)


def _is_whole(root: Path, iteration: int, group: Group) -> bool:
    def check_share() -> None:
        path = root / folder_name(iteration)
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        verify_files(path, manifest, sorted(manifest.files)[group.rank :: group.size])

    try:
        on_all(group, "checkpoint verify", check_share)
    except CheckpointError:
        return False
    return True


def _has_all_files(path: Path) -> bool:
    try:
        _check(path)
    except CheckpointError:
        return False
    return True


def _newest_first(root: Path, before: int | None) -> list[int]:
    return [iteration for iteration in reversed(iterations(root)) if before is None or iteration < before]


def _number(path: Path) -> int | None:
    """Returns the iteration in the name of a checkpoint's folder; None for a folder that was renamed."""
    digits = path.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else None


def _advice(path: Path, group: Group) -> str:
    """Returns advice on which checkpoint to load instead of a damaged one."""
    whole = newest_whole(path.parent, before=_number(path), group=group)
    return f"--ckpt-step {whole} loads" if whole is not None else f"no earlier checkpoint in {path.parent} is whole"
