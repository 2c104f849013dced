"""Folders of local checkpoints: in the memory or on a disk of each host, one for every rank.

  ROOT/megatron_SAVE_1a2b3c4d/          of the run that saves to a folder SAVE; the number is that of its path
    5e6f7a8b/                           the number of the run, which SAVE/run_id.txt holds, too
      rank_00003/                       a folder of checkpoints as in folders.py
        iter_0000120/
          metadata.json                 of the whole checkpoint, the same in all folders
          __3_0.safetensors             files of rank 3
          __2_0.safetensors             a replica of a file of another rank

So a checkpoint is spread over the folders of its ranks, and all of its files in one folder are a checkpoint as any
other. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.base.read_file import read_regular
from megatron.core.dist_checkpointing.folders import iterations
from megatron.core.dist_checkpointing.manifest import MANIFEST

RUN_ID = "run_id.txt"
_RANK = re.compile(r"rank_\d{5,}")
_ID = re.compile(r"[0-9a-f]{8}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
log = get_logger(__name__)


@dataclass(frozen=True)
class LocalPart:
    """The part of a local checkpoint that one folder holds. identity: of the folder, on whichever host it is."""

    path: Path
    identity: str
    iteration: int
    manifest_crc: int


def run_folder(root: Path, save: Path) -> Path:
    """Returns the folder under `root` of the run that saves its checkpoints to `save`."""
    return root / f"megatron_{save.absolute().name}_{zlib.crc32(os.fsencode(save.absolute())):08x}"


def rank_folder(run: Path, run_id: str, rank: int) -> Path:
    """Returns the folder of a rank's checkpoints."""
    return run / run_id / f"rank_{rank:05d}"


def is_local(checkpoint: Path) -> bool:
    """Returns whether a checkpoint's folder is that of one rank."""
    return _RANK.fullmatch(checkpoint.parent.name) is not None


def read_run_id(save: Path) -> str | None:
    """Returns the number of the run that saves to a folder; None if there is none."""
    try:
        text = read_regular(save / RUN_ID).decode("ascii", errors="replace").strip()
    except (OSError, ValueError):
        return None
    return text if _ID.fullmatch(text) else None


def renew_run_id(save: Path) -> str:
    """Gives the run another number, so that its local checkpoints up to now count no longer. Raises OSError."""
    save.mkdir(parents=True, exist_ok=True)
    run_id, temporary = secrets.token_hex(4), save / f".{RUN_ID}.tmp"
    temporary.unlink(missing_ok=True)  # it may be a link to another file
    with open(temporary, "x", encoding="ascii") as file:
        file.write(f"{run_id}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(save / RUN_ID)
    return run_id


def make_rank_folder(run: Path, run_id: str, rank: int) -> Path:
    """Makes the folder of a rank, and those above it readable by this user alone.

    Raises CheckpointError if the run's folder is another user's, as one in a folder that all may write to can be.
    """
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_mine(run):
        raise CheckpointError(f"{run} belongs to another user; give another --non-persistent-local-ckpt-dir")
    folder = rank_folder(run, run_id, rank)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def parts(run: Path, run_id: str) -> list[LocalPart]:
    """Returns the parts of local checkpoints that this process sees. Raises OSError."""
    if not run.is_dir() or not _is_mine(run):
        return []
    host, result = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else "", []
    for folder in _rank_folders(run, run_id):
        for iteration in iterations(folder):
            path = folder / f"iter_{iteration:07d}"
            if path.is_dir():
                status, content = path.stat(), read_regular(path / MANIFEST)
                identity = f"{host}:{status.st_dev}:{status.st_ino}"
                result.append(LocalPart(path, identity, iteration, zlib.crc32(content)))
    return result


def delete_others(run: Path, run_id: str, iteration: int | None) -> None:
    """Deletes all local checkpoints that this process sees but that of `iteration`. Ranks of a host may do so at the
    same time, as long as none publishes."""
    for folder in _rank_folders(run, run_id):
        for other in iterations(folder):
            if other != iteration:
                shutil.rmtree(folder / f"iter_{other:07d}", ignore_errors=True)


def delete_stale(run: Path, run_id: str) -> None:
    """Deletes folders of runs with other numbers, and incomplete ones of this run. No save may be pending."""
    for entry in list(run.iterdir()) if run.is_dir() and _is_mine(run) else ():
        if _ID.fullmatch(entry.name) and entry.name != run_id:
            log.info("deleting local checkpoints of another run in %s", entry)
            shutil.rmtree(entry, ignore_errors=True)
    for folder in _rank_folders(run, run_id):
        for entry in folder.glob(".iter_*.tmp-*"):
            shutil.rmtree(entry, ignore_errors=True)


def delete_run(run: Path, run_id: str) -> None:
    """Deletes all local checkpoints of a run on this host. Ranks of a host may do so at the same time."""
    shutil.rmtree(run / run_id, ignore_errors=True)
    with contextlib.suppress(OSError):  # another rank has deleted it, or does so now
        run.rmdir()


def _rank_folders(run: Path, run_id: str) -> list[Path]:
    folder = run / run_id
    return sorted(entry for entry in folder.iterdir() if _RANK.fullmatch(entry.name)) if folder.is_dir() else []


def _is_mine(folder: Path) -> bool:
    return folder.lstat().st_uid == os.getuid()
