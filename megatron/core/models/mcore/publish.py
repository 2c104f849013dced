"""A checkpoint for Megatron-LM gets its name when all its bytes are on disk, and the tracker names it last."""

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
    """A folder to write in; it becomes `root`'s checkpoint of `training` if the body succeeds, and is deleted if not.

    Raises CheckpointError when that checkpoint is there already, and OSError.
    """
    final, temporary = root / training.folder, root / f".{training.folder}.tmp"
    if final.exists():
        raise CheckpointError(f"{final} is there already; give another folder")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        temporary.rename(final)
        (root / TRACKER).write_text(training.tracker, encoding="ascii")
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
