"""metadata.json of a checkpoint: its tensors, the file of each chunk, sizes, checksums, and the state.

It has one line per tensor, so that it can be read and searched by hand. The last line holds the checksum of all bytes
before it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.read_file import parse_json, read_regular
from megatron.core.dist_checkpointing.tensor_file import BLOCK_BYTES, DTYPE_CODES, DTYPES, DamagedError, check_size

MANIFEST = "metadata.json"
FORMAT = "megatron-patched"
VERSION = 2  # 1: no tensor is rounded from another
_READ_VERSIONS = (1, 2)

FOLDER_NAME = re.compile(r"iter_(\d{7,})")  # name of a complete checkpoint
_FILE_NAME = re.compile(r"__\d+_\d+\.safetensors")
_FIRST_LINE = f'{{\n"format": "{FORMAT}",'.encode()
_CHECKSUM_LINE = b',\n"crc32": '


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: its position in the tensor, its file, the crc32 of its blocks of bytes, and the key and
    dtype with which it is in the file."""

    box: Box
    file: str
    crc32: tuple[str, ...]
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorRecord:
    """A saved tensor. Its chunks hold every element exactly once.

    rounded_from: name of a tensor of more precision that is saved in place of this one; the chunks are those of that
    tensor, and reading rounds their elements to `dtype`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    rounded_from: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's metadata.json. `files`: name -> bytes. `state`: the state that the caller saved.

    `iteration` is None in checkpoints written before it was recorded.
    """

    iteration: int | None
    tensors: dict[str, TensorRecord]
    files: dict[str, int]
    state: dict[str, Any]
    torch_version: str


def chunk_key(name: str, offset: tuple[int, ...]) -> str:
    """Returns the chunk's key in its safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes and syncs `folder`/metadata.json. Raises OSError; TypeError or ValueError for a state that is not JSON."""
    with open(folder / MANIFEST, "xb") as file:
        file.write(_to_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Reads `folder`/metadata.json.

    Raises CheckpointError if it is missing, damaged or of another format, or if the folder has the name of another
    iteration.
    """
    path = folder / MANIFEST
    try:
        raw = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(
            f"{path} is missing: the checkpoint is damaged, or of another format "
            "(tools/checkpoint/convert.py converts those)"
        ) from error
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    body = raw.rpartition(_CHECKSUM_LINE)[0]
    if raw != body + _checksum_line(body):
        raise _not_intact(path, raw)
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged: it is not a JSON object")
    if content.get("format") != FORMAT or content.get("version") not in _READ_VERSIONS:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r} version {content.get('version')!r}, this program reads "
            f"{FORMAT!r} version {' and '.join(map(str, _READ_VERSIONS))}; load it with the release that wrote it"
        )
    manifest = _from_json(path, content)
    named = FOLDER_NAME.fullmatch(folder.name)
    if named and manifest.iteration not in (None, int(named[1])):
        raise DamagedError(f"{path} is of iteration {manifest.iteration}: the folder was renamed; give its name back")
    return manifest


def has_our_format(folder: Path) -> bool:
    """Returns whether `folder`/metadata.json begins like one of this program's. Raises OSError."""
    with open(folder / MANIFEST, "rb") as file:
        return file.read(len(_FIRST_LINE)) == _FIRST_LINE


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises DamagedError naming the first file that is missing or differs in size from the one that was written."""
    for name, nbytes in manifest.files.items():
        check_size(folder / name, nbytes)


def _not_intact(path: Path, raw: bytes) -> CheckpointError:
    """Returns the error for a file with a wrong checksum; a file of another format is reported as such,
    not as damaged."""
    try:
        content = parse_json(raw)
    except ValueError as error:
        return DamagedError(f"{path} is damaged: it is not JSON ({error})")
    if isinstance(content, dict) and "crc32" in content:
        return DamagedError(f"{path} is damaged: its content does not have the checksum in its last line")
    return CheckpointError(
        f"{path} is not of this program's format ({FORMAT!r}); convert it with tools/checkpoint/convert.py"
    )


def _checksum_line(body: bytes) -> bytes:
    return _CHECKSUM_LINE + b'"%08x"}\n' % zlib.crc32(body)


def _to_bytes(manifest: Manifest) -> bytes:
    tensors = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(_record_to_json(record))}"
        for name, record in sorted(manifest.tensors.items())
    )
    lines = {
        "format": json.dumps(FORMAT),
        "version": json.dumps(VERSION),
        "torch": json.dumps(manifest.torch_version),
        "iteration": json.dumps(manifest.iteration),
        "block_bytes": json.dumps(BLOCK_BYTES),
        "files": json.dumps(manifest.files),
        "tensors": f"{{\n{tensors}\n}}",
        "state": json.dumps(manifest.state),
    }
    body = ("{\n" + ",\n".join(f'"{key}": {text}' for key, text in lines.items())).encode()
    return body + _checksum_line(body)


def _record_to_json(record: TensorRecord) -> dict[str, Any]:
    described = {"shape": list(record.shape), "dtype": DTYPE_CODES[record.dtype]}
    if record.rounded_from is not None:
        return {**described, "rounded_from": record.rounded_from}
    chunks = [
        {"offset": list(c.box.offset), "shape": list(c.box.shape), "file": c.file, "crc32": list(c.crc32)}
        for c in record.chunks
    ]
    return {**described, "chunks": chunks}


def _from_json(path: Path, content: dict[str, Any]) -> Manifest:
    try:
        if content["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"block_bytes is {content['block_bytes']}, not {BLOCK_BYTES}")
        # keeps reads inside the folder
        if odd := [name for name in content["files"] if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(f"file name {odd[0]!r}")
        _numbers(list(content["files"].values()))
        entries = dict(content["tensors"].items())
        tensors = {name: _record_from_json(name, entries) for name in entries}
        if lost := {chunk.file for record in tensors.values() for chunk in record.chunks} - content["files"].keys():
            raise ValueError(f"file {sorted(lost)[0]!r} is not among its files")
        iteration = content.get("iteration")
        if not (iteration is None or isinstance(iteration, int)):
            raise ValueError(f"iteration {iteration!r}")
        return Manifest(iteration, tensors, content["files"], content["state"], content["torch"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _record_from_json(name: str, entries: dict[str, Any]) -> TensorRecord:
    entry = entries[name]
    shape, dtype, origin = _numbers(entry["shape"]), DTYPES[entry["dtype"]], entry.get("rounded_from")
    if origin is not None:
        if "rounded_from" in entries[origin]:
            raise ValueError(f"{name} is rounded from {origin}, which is rounded from another tensor")
        stored = _record_from_json(origin, entries)
        if stored.shape != shape:
            raise ValueError(f"{name} {list(shape)} is rounded from {origin} {list(stored.shape)}")
        return TensorRecord(shape, dtype, stored.chunks, origin)
    chunks = tuple(_chunk_from_json(name, dtype, chunk) for chunk in entry["chunks"])
    for chunk in chunks:
        if not len(shape) == len(chunk.box.offset) == len(chunk.box.shape):
            raise ValueError(f"a chunk {chunk.box} of a tensor {list(shape)}")
        if not isinstance(chunk.file, str) or not all(isinstance(checksum, str) for checksum in chunk.crc32):
            raise ValueError(f"file {chunk.file!r} with checksums {str(chunk.crc32)[:40]}")
    return TensorRecord(shape, dtype, chunks)


def _chunk_from_json(name: str, dtype: torch.dtype, chunk: dict[str, Any]) -> Chunk:
    box = Box(_numbers(chunk["offset"]), _numbers(chunk["shape"]))
    return Chunk(box, chunk["file"], tuple(chunk["crc32"]), chunk_key(name, box.offset), dtype)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 2**63 for n in values):
        raise ValueError(f"{str(values)[:40]} where whole numbers are expected")
    return tuple(values)
