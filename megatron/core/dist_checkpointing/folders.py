"""The folder that holds a run's checkpoints: finding one, putting a new one in its place, deleting old ones.

    ROOT/latest_checkpointed_iteration.txt    "100": the newest checkpoint
    ROOT/iter_0000100/                        a whole checkpoint
    ROOT/.iter_0000120.tmp-1a2b3c4d/          being written or deleted; left by a killed run, removed by the next save
    ROOT/.iter_0000100.old-1a2b3c4d/          replaced by another of its number; whole until that one is in place

A checkpoint gets its name by one rename when all its bytes are on disk, so whatever has the name was whole once.
Megatron-LM's checkpoints have the same names (and ROOT/release/ is one that no run of its own wrote). They are found here,
and never replaced, deleted or put beside ours.
Nothing here communicates: one rank calls it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.core.dist_checkpointing.manifest import FOLDER_NAME, MANIFEST, has_our_format
from megatron.core.dist_checkpointing.storage import sync_folder

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what the tracker of a checkpoint holds that was not saved by the run that trained it
_DCP_METADATA = ".metadata"  # of torch.distributed.checkpoint
_REPLACED = re.compile(r"\.iter_(\d{7,})\.old-[0-9a-f]{8}")
_UNFINISHED = re.compile(r"\.iter_\d{7,}\.tmp-[0-9a-f]{8}")
log = get_logger(__name__)


def folder_name(iteration: int) -> str:
    """Name of an iteration's checkpoint, as Megatron-LM has it."""
    return f"iter_{iteration:07d}"


def iterations(root: Path) -> list[int]:
    """Iterations under `root` that have a metadata.json, ascending."""
    return sorted(_checkpoints(root))


def find(root: Path, iteration: int | None) -> Path | None:
    """The checkpoint of `iteration`, or the newest by the tracker file; None when `root` holds none.

    Raises CheckpointError when the tracker is not a number or names a checkpoint that is not there, or when `iteration`
    is not there.
    """
    found = _checkpoints(root)
    if iteration is None:
        if is_foreign(root / RELEASE) and _tracker_text(root) == RELEASE:
            return root / RELEASE
        iteration = _read_tracker(root, sorted(found))
        if iteration is None:
            return None
    elif iteration not in found and not is_foreign(root / folder_name(iteration)):
        raise CheckpointError(f"{root} holds no checkpoint of iteration {iteration}; it holds {_listed(sorted(found))}")
    # A folder without our manifest is handed on when the tracker names it: reading it says what it is.
    path = found.get(iteration, root / folder_name(iteration))
    if not path.is_dir():
        raise CheckpointError(
            f"{root / TRACKER} names iteration {iteration}, but {path.name} is not there; "
            f"{root} holds {_listed(sorted(found))}; pass one with --ckpt-step"
        )
    return path


def is_foreign(folder: Path) -> bool:
    """Whether the folder is a checkpoint that another program wrote. Raises OSError."""
    return (folder / _DCP_METADATA).is_file() or any(folder.glob("mp_rank_*")) or _names_a_backend(folder / MANIFEST)


def foreign_in(root: Path) -> Path | None:
    """A checkpoint of another program under `root`, or None. Raises OSError."""
    candidates = sorted(entry for entry in root.glob("iter_*")) if root.is_dir() else []
    return next((entry for entry in (*candidates, root / RELEASE) if is_foreign(entry)), None)


def begin(root: Path, iteration: int) -> Path:
    """Clean up after killed runs and make the folder to write in. One run at a time: see lock.py.

    Raises CheckpointError when `root` holds checkpoints of another program.
    """
    if other := foreign_in(root):
        raise CheckpointError(
            f"{other} is a checkpoint of Megatron-LM, and ours are not put beside it: it could be replaced, and the file "
            f"{TRACKER} can name one of them only; save to a folder of its own"
        )
    root.mkdir(parents=True, exist_ok=True)
    for entry in list(root.iterdir()):
        if replaced := _REPLACED.fullmatch(entry.name):
            final = root / folder_name(int(replaced[1]))
            if not final.exists():  # killed between the two renames of `publish`
                entry.rename(final)
                continue
        if replaced or _UNFINISHED.fullmatch(entry.name):
            shutil.rmtree(entry)
    temporary = _beside(root, iteration, "tmp")
    temporary.mkdir()
    return temporary


def publish(root: Path, iteration: int, temporary: Path) -> Path:
    """Give the finished `temporary` its name and then name it in the tracker. Raises OSError, changing nothing."""
    final, tracker = root / folder_name(iteration), root / f".{TRACKER}.tmp"
    with open(tracker, "w", encoding="ascii") as file:  # first, as this can fail on a full disk and renaming cannot
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    replaced = _beside(root, iteration, "old") if final.exists() else None
    if replaced:
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced:
            replaced.rename(final)
        raise
    sync_folder(root)
    tracker.rename(root / TRACKER)
    sync_folder(root)
    if replaced:
        _delete(replaced)
    return final


def prune(root: Path, newest: int, keep: int) -> None:
    """Delete all but `keep` checkpoints: `newest`, just saved, and those before it.

    Later iterations are from a branch of the run that was given up by loading an earlier one; they go first. A folder
    of another format stays, and one that cannot be deleted is reported and stays.
    """
    found = {iteration: path for iteration, path in _checkpoints(root).items() if has_our_format(path)}
    order = sorted(found, key=lambda i: (i > newest, -i))
    for iteration in order[keep:]:
        doomed = _beside(root, iteration, "tmp")  # so that one half deleted never has a checkpoint's name
        try:
            found[iteration].rename(doomed)
        except OSError as error:
            log.warning("could not delete old checkpoint %s: %s", found[iteration], error)
            continue
        _delete(doomed)


def _checkpoints(root: Path) -> dict[int, Path]:
    """Iteration -> folder. One that was moved aside counts while nothing else has its number."""
    found: dict[int, Path] = {}
    for pattern in (_REPLACED, FOLDER_NAME):
        for entry in root.iterdir() if root.is_dir() else ():
            match = pattern.fullmatch(entry.name)
            if match and (entry / MANIFEST).is_file():
                found[int(match[1])] = entry
    return found


def _names_a_backend(path: Path) -> bool:
    """Whether this metadata.json is one of Megatron-LM's, rather than ours or damaged."""
    if not path.is_file() or has_our_format(path.parent):
        return False
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and "sharded_backend" in content


def _tracker_text(root: Path) -> str | None:
    try:
        return (root / TRACKER).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _read_tracker(root: Path, held: list[int]) -> int | None:
    """The iteration that the tracker names; without a tracker the newest there is, or None."""
    tracker = root / TRACKER
    try:
        text = tracker.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        if held:
            log.warning("%s is missing; taking the newest checkpoint in %s, iteration %d", tracker, root, held[-1])
        return held[-1] if held else None
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({error.strerror}); {root} holds {_listed(held)}; pass one with --ckpt-step"
        ) from error
    if not text.isdecimal():
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r} instead of an iteration; {root} holds {_listed(held)}; "
            "write one of them into it or pass it with --ckpt-step"
        )
    return int(text)


def _listed(held: list[int]) -> str:
    return f"iterations {', '.join(map(str, held))}" if held else "no checkpoint"


def _beside(root: Path, iteration: int, kind: str) -> Path:
    return root / f".{folder_name(iteration)}.{kind}-{secrets.token_hex(4)}"


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("could not delete %s: %s; the next save tries again", folder, error)
