"""One safetensors file of chunks: written in one pass with its checksums, read lazily and checked.

The format: 8 bytes little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, then the raw
row-major tensors (https://huggingface.co/docs/safetensors). Files are written here rather than by the safetensors
library so that a rank holds only one tensor in host memory at a time, checksums cost no second pass, and the file is
synced through the descriptor that wrote it. They are read with the library.

Checksums are crc32 of BLOCK_BYTES pieces of each tensor's bytes, so that reading a slice checks only what it touches.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.errors import CheckpointError

BLOCK_BYTES = 16 * 2**20

# Codes of the safetensors header; also the dtype names of metadata.json.
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short or altered; an earlier checkpoint may be whole."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write. `fetch` is called once, when its turn comes: it may copy from a device."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(path: Path, sources: Sequence[TensorSource]) -> dict[str, tuple[str, ...]]:
    """Write and sync a safetensors file; returns key -> checksums (8 hex digits a block). Raises OSError."""
    # Widest dtype first, as the library does: every tensor then starts at a multiple of its element size.
    ordered = sorted(sources, key=lambda s: -s.dtype.itemsize)
    checksums: dict[str, tuple[str, ...]] = {}
    with open(path, "xb") as file:
        file.write(_header(ordered))
        for source in ordered:
            data = _bytes_of(source.fetch().detach().cpu().contiguous())
            crcs = []
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                crcs.append(_crc(block))
                file.write(block)
            checksums[source.key] = tuple(crcs)
        file.flush()
        os.fsync(file.fileno())
    return checksums


class TensorFile:
    """An open safetensors file whose tensors are views of mapped memory: only what is touched is read from disk."""

    def __init__(self, path: Path, handle: Any) -> None:
        """`handle` is an open safetensors.safe_open, whose methods have no types."""
        self._path = path
        self._handle = handle
        self._checked: set[tuple[str, int]] = set()

    def read(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], crc32: Sequence[str], part: Box) -> Tensor:
        """Elements `part` of tensor `key`, as a view valid while the file is open.

        Raises DamagedError when the tensor is not there with `dtype` and `shape`, or when a block that `part` touches
        does not have its checksum.
        """
        try:
            tensor: Tensor = self._handle.get_tensor(key)
        except SafetensorError as error:
            raise DamagedError(f"{self._path} is damaged: tensor {key} cannot be read ({error})") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise DamagedError(
                f"{self._path} is damaged: tensor {key} is {tensor.dtype} {list(tensor.shape)}, "
                f"metadata.json says {dtype} {list(shape)}"
            )
        if part.numel:
            self._check(key, tensor, crc32, part)
        for dim, (start, length) in enumerate(zip(part.offset, part.shape)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def _check(self, key: str, tensor: Tensor, crc32: Sequence[str], part: Box) -> None:
        data = _bytes_of(tensor)
        if len(crc32) != -(-len(data) // BLOCK_BYTES):
            raise DamagedError(f"{self._path}: metadata.json has {len(crc32)} checksums for {len(data)} bytes of {key}")
        # The rectangle lies between its first and last element in row-major order.
        first = sum(start * stride for start, stride in zip(part.offset, tensor.stride()))
        last = sum((start + n - 1) * stride for start, n, stride in zip(part.offset, part.shape, tensor.stride()))
        size = tensor.element_size()
        for number in range(first * size // BLOCK_BYTES, ((last + 1) * size - 1) // BLOCK_BYTES + 1):
            if (key, number) in self._checked:
                continue
            found = _crc(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
            if found != crc32[number]:
                raise DamagedError(
                    f"{self._path} is damaged: tensor {key} has checksum {found} in its block {number}, "
                    f"{crc32[number]} was written"
                )
            self._checked.add((key, number))


@contextlib.contextmanager
def open_tensor_file(path: Path, nbytes: int) -> Iterator[TensorFile]:
    """Open a file written with `nbytes`. Raises DamagedError when it is missing, of another size or unreadable."""
    check_size(path, nbytes)
    try:
        handle = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path} is damaged: it is not a readable safetensors file ({error})") from error
    with handle:
        yield TensorFile(path, handle)


def check_size(path: Path, nbytes: int) -> None:
    """Raise DamagedError unless the file is there and has `nbytes`."""
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    if found != nbytes:
        raise DamagedError(f"{path} is damaged: it has {found} bytes, {nbytes} were written")


def _header(sources: Sequence[TensorSource]) -> bytes:
    entries, start = {}, 0
    for source in sources:
        stop = start + source.nbytes
        code = DTYPE_CODES[source.dtype]
        entries[source.key] = {"dtype": code, "shape": list(source.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The row-major bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _crc(block: memoryview) -> str:
    return f"{zlib.crc32(block):08x}"
