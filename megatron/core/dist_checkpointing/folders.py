"""The folder of a run's checkpoints: finding a checkpoint, publishing a new one, deleting old ones.

  ROOT/latest_checkpointed_iteration.txt    "100": the newest checkpoint
  ROOT/best_checkpoint.json                 the checkpoint with the best evaluation, if a run compares them
  ROOT/iter_0000100/                        a complete checkpoint
  ROOT/.iter_0000120.tmp-1a2b3c4d/          being written or deleted; left by a killed run, removed by the next save
  ROOT/.iter_0000100.old-1a2b3c4d/          replaced by another of the same iteration; complete until that is published

A checkpoint gets its name by one rename after all its bytes are on disk, so a folder with that name was complete once.
Megatron-LM's checkpoints have the same names (and ROOT/release/ is a checkpoint without an iteration). They are found
here, but never replaced or deleted, and new checkpoints are not written next to them.

Nothing here communicates: one rank calls it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.base.read_file import read_json, read_regular
from megatron.core.dist_checkpointing.best import read_best
from megatron.core.dist_checkpointing.manifest import FOLDER_NAME, MANIFEST, has_our_format
from megatron.core.dist_checkpointing.storage import sync_folder

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # the tracker's content for a checkpoint that was not saved by its training run
_MOST_DIGITS = 18
_DCP_METADATA = ".metadata"  # the metadata file of torch.distributed.checkpoint
_REPLACED = re.compile(r"\.iter_(\d{7,})\.old-[0-9a-f]{8}")
_UNFINISHED = re.compile(r"\.iter_\d{7,}\.tmp-[0-9a-f]{8}")
log = get_logger(__name__)


def folder_name(iteration: int) -> str:
    """Returns the folder name of an iteration's checkpoint, as in Megatron-LM."""
    return f"iter_{iteration:07d}"


def iterations(root: Path) -> list[int]:
    """Returns the iterations under `root` that have a metadata.json, ascending."""
    return sorted(_checkpoints(root))


def find(root: Path, iteration: int | None) -> Path | None:
    """Returns the checkpoint of `iteration`, or the newest by the tracker file; None if `root` has none.

    Raises CheckpointError if the tracker does not hold a number or names a missing checkpoint, if `iteration` is
    missing, and if `root` is a checkpoint itself or has checkpoints that nothing names.
    """
    checkpoints = _checkpoints(root)
    if iteration is None:
        if is_foreign(root / RELEASE) and _tracker_text(root) == RELEASE:
            return root / RELEASE
        iteration = _read_tracker(root, sorted(checkpoints))
        if iteration is None:
            _check_holds_nothing(root)
            return None
    elif iteration not in checkpoints and not is_foreign(root / folder_name(iteration)):
        listed = _listed(sorted(checkpoints))
        raise CheckpointError(f"{root} holds no checkpoint of iteration {iteration}; it holds {listed}")
    # A folder without our manifest is returned if the tracker names it: reading it reports its format.
    path = checkpoints.get(iteration, root / folder_name(iteration))
    if not path.is_dir():
        raise CheckpointError(
            f"{root / TRACKER} names iteration {iteration}, but {path.name} is not there; "
            f"{root} holds {_listed(sorted(checkpoints))}; pass one with --ckpt-step"
        )
    return path


def is_foreign(folder: Path) -> bool:
    """Returns whether another program wrote the folder's checkpoint. Raises OSError."""
    return (folder / _DCP_METADATA).is_file() or any(folder.glob("mp_rank_*")) or _names_a_backend(folder / MANIFEST)


def foreign_in(root: Path) -> Path | None:
    """Returns a checkpoint of another program under `root`, or None. Raises OSError."""
    candidates = sorted(entry for entry in root.glob("iter_*")) if root.is_dir() else []
    return next((entry for entry in (*candidates, root / RELEASE) if is_foreign(entry)), None)


def begin(root: Path, iteration: int) -> Path:
    """Cleans up after killed runs and creates the folder to write in. Only one run may do so at a time: see lock.py.

    Raises CheckpointError if `root` holds checkpoints of another program.
    """
    if other := foreign_in(root):
        raise CheckpointError(
            f"{other} is a checkpoint of Megatron-LM, and ours are not put beside it: it could be replaced, "
            f"and the file {TRACKER} can name one of them only; save to a folder of its own"
        )
    root.mkdir(parents=True, exist_ok=True)
    for entry in list(root.iterdir()):
        if replaced := _REPLACED.fullmatch(entry.name):
            final = root / folder_name(int(replaced[1]))
            if not final.exists():  # killed between the two renames of `publish`
                entry.rename(final)
                continue
        if replaced or _UNFINISHED.fullmatch(entry.name):
            _remove(entry)
    temporary = _temporary_path(root, iteration, "tmp")
    temporary.mkdir()
    return temporary


def publish(root: Path, iteration: int, temporary: Path) -> Path:
    """Renames the finished `temporary` and then writes the tracker. Raises OSError without changing anything."""
    final, tracker = root / folder_name(iteration), root / f".{TRACKER}.tmp"
    # first, because this can fail on a full disk and renaming cannot
    tracker.unlink(missing_ok=True)  # it may be a link to another file
    with open(tracker, "x", encoding="ascii") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    replaced = _temporary_path(root, iteration, "old") if final.exists() else None
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
    """Deletes all but `keep` checkpoints, `newest`, just saved, and those before it, and the best one: see best.py.

    Later iterations belong to a branch of the run that was abandoned by loading an earlier one; they are deleted first.
    A folder of another format stays, and one that cannot be deleted is reported and stays.
    """
    checkpoints = {iteration: path for iteration, path in _checkpoints(root).items() if has_our_format(path)}
    order, best = sorted(checkpoints, key=lambda i: (i > newest, -i)), read_best(root)
    for iteration in order[keep:]:
        if best is not None and iteration == best.iteration:
            continue
        # renamed first, so that a half-deleted folder never has a checkpoint's name
        doomed = _temporary_path(root, iteration, "tmp")
        try:
            checkpoints[iteration].rename(doomed)
        except OSError as error:
            log.warning("could not delete old checkpoint %s: %s", checkpoints[iteration], error)
            continue
        _delete(doomed)


def _checkpoints(root: Path) -> dict[int, Path]:
    """Returns iteration -> folder. A replaced checkpoint counts if no other folder has its iteration."""
    checkpoints: dict[int, Path] = {}
    for pattern in (_REPLACED, FOLDER_NAME):
        for entry in root.iterdir() if root.is_dir() else ():
            match = pattern.fullmatch(entry.name)
            if match and (entry / MANIFEST).is_file():
                checkpoints[int(match[1])] = entry
    return checkpoints


def _names_a_backend(path: Path) -> bool:
    """Returns whether this metadata.json was written by Megatron-LM, rather than by this program or damaged."""
    if not path.is_file() or has_our_format(path.parent):
        return False
    try:
        content = read_json(path)
    except ValueError:
        return False
    return isinstance(content, dict) and "sharded_backend" in content


def _check_holds_nothing(root: Path) -> None:
    """Raise CheckpointError if a folder without a tracker and without checkpoints of ours is not one to start afresh
    in."""
    if is_foreign(root) or (root / MANIFEST).is_file():
        match = FOLDER_NAME.fullmatch(root.absolute().name)
        step = f", with --ckpt-step {int(match[1])} if it is not the newest" if match else ""
        raise CheckpointError(
            f"{root} is a checkpoint itself; give the folder that holds it, {root.absolute().parent}{step}"
        )
    entries = sorted(root.iterdir()) if root.is_dir() else []
    named = [entry for entry in entries if FOLDER_NAME.fullmatch(entry.name) or entry.name == RELEASE]
    if not named:
        return
    if is_foreign(named[-1]):
        match = FOLDER_NAME.fullmatch(named[-1].name)
        text, flag = (str(int(match[1])), f", or pass --ckpt-step {int(match[1])}") if match else (RELEASE, "")
        raise CheckpointError(
            f"{root} holds {named[-1].name} of another program, and no {TRACKER} that names it; write {text} into that "
            f"file{flag}"
        )
    raise CheckpointError(
        f"{root} holds {named[-1].name} without its {MANIFEST}, and no {TRACKER}: copy the checkpoint again, or give "
        "another folder to start afresh"
    )


def _tracker_text(root: Path) -> str | None:
    try:
        return read_regular(root / TRACKER).decode("ascii", errors="replace").strip()
    except (OSError, ValueError):
        return None


def _read_tracker(root: Path, held: list[int]) -> int | None:
    """Returns the iteration that the tracker names; without a tracker the newest one, or None."""
    tracker = root / TRACKER
    try:
        text = read_regular(tracker).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        if held:
            log.warning("%s is missing; taking the newest checkpoint in %s, iteration %d", tracker, root, held[-1])
        return held[-1] if held else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{tracker} cannot be read ({reason}); {root} holds {_listed(held)}; pass one with --ckpt-step"
        ) from error
    if not is_iteration(text):
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r} instead of an iteration; {root} holds {_listed(held)}; "
            "write one of them into it or pass it with --ckpt-step"
        )
    return int(text)


def is_iteration(text: str) -> bool:
    """Returns whether the content of a tracker is the number of an iteration."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _listed(held: list[int]) -> str:
    return f"iterations {', '.join(map(str, held))}" if held else "no checkpoint"


def _temporary_path(root: Path, iteration: int, kind: str) -> Path:
    return root / f".{folder_name(iteration)}.{kind}-{secrets.token_hex(4)}"


def _remove(folder: Path) -> None:
    """Deletes a folder, or a link to one, and not what it points to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _delete(folder: Path) -> None:
    try:
        _remove(folder)
    except OSError as error:
        log.warning("could not delete %s: %s; the next save tries again", folder, error)
