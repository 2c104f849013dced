"""Publishes a checkpoint for Megatron-LM: renamed when all its bytes are on disk, and then named by the tracker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.storage import sync_folder
from megatron.core.models.mcore.training_state import TrainingState


@contextmanager
def published(root: Path, training: TrainingState) -> Iterator[Path]:
    """Yields a folder to write in; it becomes `root`'s checkpoint of `training` if the body succeeds, and is deleted if
    not.

    Raises CheckpointError if that checkpoint exists, and OSError.
    """
    final, temporary = root / training.folder, root / f".{training.folder}.tmp"
    if final.exists():
        raise CheckpointError(f"{final} exists; give another folder")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        temporary.rename(final)
        (root / TRACKER).unlink(missing_ok=True)  # it may be a link to another file
        (root / TRACKER).write_text(training.tracker, encoding="ascii")
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
