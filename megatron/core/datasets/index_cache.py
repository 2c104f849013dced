"""Arrays kept in a folder under a hash of what they depend on: built once, memory-mapped afterwards.

Any number of processes on any number of hosts may ask for the same arrays at the same time. Each that finds none builds
them in a folder of its own and renames that to the final name. Renaming a folder is atomic and fails when the final
name is taken, so the first one wins, the others drop theirs, and a folder under the final name is always whole. A
process that is killed leaves a hidden folder (`.NAME.*`) behind, which nothing reads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.errors import DataError
from megatron.core.log import get_logger

Arrays = Mapping[str, npt.NDArray[Any]]
LOGGER = get_logger(__name__)


def cached_arrays(
    folder: Path | None, label: str, names: Collection[str], inputs: Mapping[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """The arrays `names` of `build()`, from `folder` if they are there, else built and stored.

    `inputs`, JSON values, must hold everything the arrays depend on; it is stored beside them. `label` only makes the
    folder's name readable. Without a folder, or when it cannot be written (logged), the arrays stay in memory. Raises
    DataError for a stored array that cannot be read.
    """
    if folder is None:
        return build()
    text = json.dumps(inputs, sort_keys=True, indent=1)
    entry = folder / f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{label}"
    if not entry.is_dir():
        arrays = build()
        try:
            _publish(entry, text, arrays)
        except OSError as error:
            LOGGER.warning(
                "cannot keep the sample index in %s (%s): every process builds its own at each start; "
                "give a writable --data-cache-path",
                folder,
                error,
            )
            return arrays
        LOGGER.info("built sample index %s", entry)
    return {name: _load(entry / f"{name}.npy") for name in names}


def index_inputs(idx_path: str, *, version: int, **sizes: int) -> dict[str, Any]:
    """`inputs` of arrays that depend on an `.idx` file and on numbers; `version` changes with the arrays' meaning."""
    status = os.stat(idx_path)
    return {
        "version": version,
        "path": os.path.realpath(idx_path),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        **sizes,
    }


def _publish(entry: Path, text: str, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    beside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    try:
        beside.mkdir()
        (beside / "description.json").write_text(text + "\n", encoding="utf-8")
        for name, array in arrays.items():
            with open(beside / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                # Else a crash of the host could leave the name in place and the bytes not.
                file.flush()
                os.fsync(file.fileno())
        beside.rename(entry)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    # Another process was first: its arrays are the same.


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); remove the folder {path.parent} to build it again") from error
