"""Stores arrays in a folder under a hash of their inputs: they are built once and memory-mapped afterwards.

Any number of processes on any number of hosts may ask for the same arrays at the same time. Each process that finds
none builds them in a temporary folder and renames that to the final name. Renaming a folder is atomic and fails if the
final name exists, so the first process wins, the others delete their folders, and a folder under the final name is
always complete. A process that is killed leaves a hidden folder (`.NAME.*`) behind, which nothing reads and the next
builder removes.

A flipped bit in an index would silently change which samples are read. So description.json holds a checksum of every
array's file, which each process verifies when it opens the entry: one pass over the files, about one second per
gigabyte.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError
from megatron.base.log import get_logger
from megatron.base.read_file import read_json
from megatron.core.datasets.scratch import is_left, open_held

Arrays = Mapping[str, npt.NDArray[Any]]
DESCRIPTION = "description.json"
FORMAT = 2  # This version of the entry format is part of its name.
CHECKED_AT_ONCE = 1 << 24  # bytes
LOGGER = get_logger(__name__)


def cached_arrays(
    folder: Path | None, label: str, names: Collection[str], inputs: Mapping[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """Returns the arrays `names` of `build()`, read from `folder` if they are stored there, otherwise built and stored.

    `inputs`, JSON values, must hold everything that the arrays depend on; it is stored with them. `label` only makes
    the folder's name readable. Without a folder, or if it cannot be written (logged), the arrays stay in memory. Raises
    DataError for a stored array that cannot be read or has the wrong checksum.
    """
    if folder is None:
        return build()
    inputs = {"format": FORMAT, **inputs}
    text = json.dumps(inputs, sort_keys=True, indent=1)
    entry = folder / f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{label}"
    if not entry.is_dir():
        arrays = build()
        try:
            _publish(entry, inputs, arrays)
        except OSError as error:
            LOGGER.warning(
                "cannot keep the sample index in %s (%s): every process builds its own at each start; "
                "give a writable --data-cache-path",
                folder,
                error,
            )
            return arrays
        LOGGER.info("built sample index %s", entry)
    return _load(entry, inputs, names)


def index_inputs(idx_path: str, *, version: int, **sizes: int) -> dict[str, Any]:
    """Returns `inputs` for arrays that depend on an `.idx` file and on numbers; raise `version` if their meaning
    changes.
    """
    status = os.stat(idx_path)
    return {
        "version": version,
        "path": os.path.realpath(idx_path),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        **sizes,
    }


def _publish(entry: Path, inputs: Mapping[str, Any], arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    for other in entry.parent.glob(f".{entry.name}.*"):
        if is_left(other / DESCRIPTION):
            shutil.rmtree(other, ignore_errors=True)  # another process may do the same
    temporary = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        with open_held(temporary / DESCRIPTION) as description:
            _write(temporary, inputs, arrays, description)
            temporary.rename(entry)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    # Another process was first, and its arrays are the same.


def _write(folder: Path, inputs: Mapping[str, Any], arrays: Arrays, description: BinaryIO) -> None:
    checksums: dict[str, str] = {}
    for name, array in arrays.items():
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            # Otherwise a crash of the host could leave the name without the data.
            file.flush()
            os.fsync(file.fileno())
        checksums[name] = _crc32(folder / f"{name}.npy")
    text = json.dumps({"inputs": inputs, "crc32": checksums}, sort_keys=True, indent=1)
    description.write(f"{text}\n".encode())
    description.flush()
    os.fsync(description.fileno())


def _load(entry: Path, inputs: Mapping[str, Any], names: Collection[str]) -> Arrays:
    path = entry / DESCRIPTION
    try:
        description = read_json(path)
        if description["inputs"] != inputs:
            raise ValueError("it describes other arrays")
        arrays = {}
        for name in names:
            path = entry / f"{name}.npy"
            if _crc32(path) != description["crc32"].get(name):
                raise ValueError(f"it has not its checksum in {DESCRIPTION}")
            arrays[name] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}; remove the folder {entry} to build it again") from error
    return arrays


def _crc32(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(CHECKED_AT_ONCE):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"
