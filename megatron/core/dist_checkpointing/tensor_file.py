"""One safetensors file: written in one pass with its checksums, read lazily and checked.

The format is 8 bytes little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, then the raw
row-major tensors (https://huggingface.co/docs/safetensors). Files are written here rather than by the safetensors
library so that a rank holds only one block of a tensor in host memory at a time, checksums need no second pass, and the
file is synced through the descriptor that wrote it. They are read here, too: the library maps a whole file as long as
it is open, and every page that was read stays resident; here only the tensor that is being read is mapped.

Checksums are crc32 of BLOCK_BYTES pieces of each tensor's bytes, so that reading a slice checks only the blocks it
touches.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.read_file import parse_json

BLOCK_BYTES = 16 * 2**20
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit

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
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated or altered; an earlier checkpoint may be complete."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write. `fetch` is called once, just before writing, and may copy from a device or read a file.

    It yields the tensor's elements in row-major order, in blocks of any sizes.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path, sources: Sequence[TensorSource], metadata: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Writes and syncs a safetensors file; returns key -> checksums (8 hex digits per block). Raises OSError."""
    # The widest dtype comes first, as in the library: every tensor then starts at a multiple of its element size.
    ordered = sorted(sources, key=lambda s: -s.dtype.itemsize)
    with open(path, "xb") as file:
        file.write(_header(ordered, metadata))
        checksums = {source.key: _write_data(file, source) for source in ordered}
        file.flush()
        os.fsync(file.fileno())
    return checksums


def _write_data(file: BinaryIO, source: TensorSource) -> tuple[str, ...]:
    """Writes one tensor and returns the checksums of its blocks, which are independent of the blocks that `fetch`
    yields.
    """
    crcs: list[str] = []
    crc, filled, written = 0, 0, 0
    for tensor in source.fetch():
        assert tensor.dtype == source.dtype, f"{source.key}: {tensor.dtype} instead of {source.dtype}"
        data = _bytes_of(tensor.detach().cpu().contiguous())
        while len(data):
            block, data = data[: BLOCK_BYTES - filled], data[BLOCK_BYTES - filled :]
            crc, filled = _crc(block, crc), filled + len(block)
            file.write(block)
            written += len(block)
            if filled == BLOCK_BYTES or written == source.nbytes:
                crcs.append(_hex(crc))
                crc, filled = 0, 0
    assert written == source.nbytes, f"{source.key}: {written} bytes instead of {source.nbytes}"
    return tuple(crcs)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its dtype, its shape, and the position of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A safetensors file whose tensors are read as views of mapped memory: only touched pages are read from disk.

    `entries`: key -> Entry. `metadata`: the strings of the header.
    """

    def __init__(self, path: Path) -> None:
        """Raises DamagedError if the file is missing, not a safetensors file, or contradicts its header, which must
        describe adjacent tensors that fill the file.
        """
        self._path = path
        self.entries, self.metadata = _read_header(path)
        self._checked: set[tuple[str, int]] = set()

    def view(self, key: str) -> Tensor:
        """Returns the whole tensor in memory that is mapped until the last view is gone; do not write to it."""
        entry = self.entries[key]
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        if nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        before = entry.start % mmap.ALLOCATIONGRANULARITY
        with open(self._path, "rb") as file:
            # Copy on write makes it writable for torch, which warns about read-only memory.
            mapped = mmap.mmap(file.fileno(), before + nbytes, access=mmap.ACCESS_COPY, offset=entry.start - before)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=before).view(entry.dtype).view(entry.shape)

    def fill(self, out: Tensor, numbers: Sequence[int], keys: Sequence[str], part: Box) -> None:
        """Copies elements `part` of tensor `key` to out[number], rounded to its dtype, for each number and key.

        The file is opened once and read in the order of its bytes. Elements that follow each other there are read into
        `out`, without any other memory. Raises DamagedError for a file that has become shorter; OSError.
        """
        size, entries = part.numel * out.element_size(), [self.entries[key] for key in keys]
        if size == 0 or not entries:
            return
        shape = entries[0].shape
        first, last = _ends(part, shape)
        is_direct = out.is_contiguous() and last - first == part.numel - 1
        if not is_direct or any(entry.shape != shape or entry.dtype != out.dtype for entry in entries):
            for _, number, key in sorted(zip((entry.start for entry in entries), numbers, keys, strict=True)):
                out[number].copy_(narrow(self.view(key), part))
            return
        data, skipped = _bytes_of(out), first * out.element_size()
        with open(self._path, "rb", buffering=0) as file:
            for start, number, count in _stretches([entry.start for entry in entries], numbers, size):
                self._read_into(file.fileno(), data[number * size : (number + count) * size], start + skipped)

    def _read_into(self, descriptor: int, data: memoryview, position: int) -> None:
        while len(data):
            count = os.preadv(descriptor, [data], position)
            if count == 0:
                raise DamagedError(
                    f"{self._path} is damaged: it ends at byte {position}, where its header has a tensor"
                )
            data, position = data[count:], position + count

    def read(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], crc32: Sequence[str], part: Box) -> Tensor:
        """Returns elements `part` of tensor `key`, as a view.

        Raises DamagedError if the tensor with `dtype` and `shape` is missing, or if a block that `part` touches has a
        wrong checksum.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise DamagedError(f"{self._path} is damaged: it holds no tensor {key}")
        if entry.dtype != dtype or entry.shape != shape:
            raise DamagedError(
                f"{self._path} is damaged: tensor {key} is {entry.dtype} {list(entry.shape)}, "
                f"metadata.json says {dtype} {list(shape)}"
            )
        tensor = self.view(key)
        if part.numel:
            self._check(key, tensor, crc32, part)
        return narrow(tensor, part)

    def _check(self, key: str, tensor: Tensor, crc32: Sequence[str], part: Box) -> None:
        data = _bytes_of(tensor)
        if len(crc32) != -(-len(data) // BLOCK_BYTES):
            raise DamagedError(f"{self._path}: metadata.json has {len(crc32)} checksums for {len(data)} bytes of {key}")
        first, last = _ends(part, tuple(tensor.shape))
        size = tensor.element_size()
        for number in range(first * size // BLOCK_BYTES, ((last + 1) * size - 1) // BLOCK_BYTES + 1):
            if (key, number) in self._checked:
                continue
            checksum = _hex(_crc(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES], 0))
            if checksum != crc32[number]:
                raise DamagedError(
                    f"{self._path} is damaged: tensor {key} has checksum {checksum} in its block {number}, "
                    f"{crc32[number]} was written"
                )
            self._checked.add((key, number))


def open_tensor_file(path: Path, nbytes: int) -> TensorFile:
    """Opens a file written with `nbytes`. Raises DamagedError if it is missing, of another size or unreadable."""
    check_size(path, nbytes)
    return TensorFile(path)


def narrow(tensor: Tensor, part: Box) -> Tensor:
    """Returns the elements `part` of a tensor, as a view."""
    for dim, (start, length) in enumerate(zip(part.offset, part.shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _stretches(starts: Sequence[int], numbers: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, number, count) of tensors of `size` bytes that follow each other in the file and in
    memory."""
    begin, first, count = -1, -1, 0
    for start, number in sorted(zip(starts, numbers, strict=True)):
        if start == begin + count * size and number == first + count:
            count += 1
            continue
        if count:
            yield begin, first, count
        begin, first, count = start, number, 1
    yield begin, first, count


def _ends(part: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the first and the last element of a rectangle in the row-major order of a tensor of `shape`."""
    first, last = 0, 0
    for start, n, size in zip(part.offset, part.shape, shape, strict=True):
        first, last = first * size + start, last * size + start + n - 1
    return first, last


def check_size(path: Path, nbytes: int) -> None:
    """Raises DamagedError unless the file exists and has `nbytes`."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    if size != nbytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, {nbytes} were written")


def _header(sources: Sequence[TensorSource], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for source in sources:
        stop = start + source.nbytes
        code = DTYPE_CODES[source.dtype]
        entries[source.key] = {"dtype": code, "shape": list(source.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError(f"its header would be {length} bytes of its {size}")
            content = parse_json(file.read(length))
        metadata = content.pop(_METADATA, {})
        if not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
            raise ValueError(f"{_METADATA} is not an object of strings")
        spans = {key: _span(key, value) for key, value in content.items()}
        end = 0
        for key, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            if start != end:
                raise ValueError(f"tensor {key} begins at byte {start} where {end} is the next")
            end = stop
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes and its header says {8 + length + end}")
        entries = {
            key: Entry(DTYPES[value["dtype"]], tuple(value["shape"]), 8 + length + spans[key][0])
            for key, value in content.items()
        }
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"unknown or missing {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedError(f"{path} is damaged or no safetensors file: {reason}") from error
    return entries, metadata


def _span(key: str, value: Any) -> tuple[int, int]:
    """Returns the first byte of a tensor in the file's data and the one after its last. Raises ValueError."""
    offsets, shape = value["data_offsets"], value["shape"]
    if not (_are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"tensor {key} has offsets {offsets}")
    if not _are_sizes(shape):
        raise ValueError(f"tensor {key} has shape {shape}")
    start, stop = offsets
    if stop - start != math.prod(shape) * DTYPES[value["dtype"]].itemsize:
        raise ValueError(f"tensor {key} of shape {shape} has {stop - start} bytes")
    return start, stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the row-major bytes of a contiguous CPU tensor without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _crc(block: memoryview, before: int) -> int:
    """Returns the checksum of data that has the checksum `before`, followed by `block`."""
    return zlib.crc32(block, before)


def _hex(crc: int) -> str:
    return f"{crc:08x}"
