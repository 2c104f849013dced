"""Arrays kept in a folder under a hash of what they depend on: built once, memory-mapped afterwards.

Any number of processes on any number of hosts may ask for the same arrays at the same time. Each that finds none builds
them in a folder of its own and renames that to the final name. Renaming a folder is atomic and fails when the final
name is taken, so the first one wins, the others drop theirs, and a folder under the final name is always whole. A
process that is killed leaves a hidden folder (`.NAME.*`) behind, which nothing reads and the next builder removes.

A bit that flips in an index changes which samples are read and nothing would notice. So description.json holds a
checksum of every array's file, which each process verifies when it opens the entry: one pass over the files, about a
second per gigabyte.
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
from megatron.core.datasets.scratch import is_left, open_held

Arrays = Mapping[str, npt.NDArray[Any]]
DESCRIPTION = "description.json"
FORMAT = 2  # of an entry; part of its name
CHECKED_AT_ONCE = 1 << 24  # bytes
LOGGER = get_logger(__name__)


def cached_arrays(
    folder: Path | None, label: str, names: Collection[str], inputs: Mapping[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """The arrays `names` of `build()`, from `folder` if they are there, else built and stored.

    `inputs`, JSON values, must hold everything the arrays depend on; it is stored beside them. `label` only makes the
    folder's name readable. Without a folder, or when it cannot be written (logged), the arrays stay in memory. Raises
    DataError for a stored array that cannot be read or is not what was stored.
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
    """`inputs` of arrays that depend on an `.idx` file and on numbers; `version` changes with the arrays' meaning."""
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
    beside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    try:
        beside.mkdir()
        with open_held(beside / DESCRIPTION) as description:
            _write(beside, inputs, arrays, description)
            beside.rename(entry)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    # Another process was first: its arrays are the same.


def _write(folder: Path, inputs: Mapping[str, Any], arrays: Arrays, description: BinaryIO) -> None:
    checksums: dict[str, str] = {}
    for name, array in arrays.items():
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            # Else a crash of the host could leave the name in place and the bytes not.
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
        description = json.loads(path.read_bytes())
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
