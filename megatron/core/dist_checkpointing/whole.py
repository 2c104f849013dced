"""Checkpoints in one process: any rectangle of their global tensors, and new ones streamed block by block."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box, intersect
from megatron.core.dist_checkpointing.folders import begin, publish
from megatron.core.dist_checkpointing.manifest import (
    Chunk,
    Manifest,
    TensorRecord,
    check_sizes,
    chunk_key,
    read_manifest,
    write_manifest,
)
from megatron.core.dist_checkpointing.tensor_file import (
    DamagedError,
    TensorFile,
    TensorSource,
    narrow,
    open_tensor_file,
    write_tensor_file,
)

FILE_BYTES = 2**30  # approximate size of a file
BLOCK_BYTES = 2**25  # maximum size of a written block
WRITERS = 2  # files written at once: one is synced while another is filled


class WholeReader:
    """Reads any rectangle of a checkpoint's tensors. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a checkpoint that is damaged or of another format."""
        self._path, self.manifest = path, read_manifest(path)
        check_sizes(path, self.manifest)
        self._files: dict[str, TensorFile] = {}

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Returns elements `box` of global tensor `name`, in new memory. Raises DamagedError for a wrong checksum."""
        record = self.manifest.tensors[name]
        out = torch.empty(box.shape, dtype=dtype)
        for chunk in record.chunks:
            if common := intersect(chunk.box, box):
                part, target = common.within(chunk.box), common.within(box)
                saved = self._file(chunk.file).read(chunk.key, chunk.dtype, chunk.box.shape, chunk.crc32, part)
                narrow(out, target).copy_(saved)
        return out

    def view(self, name: str, box: Box) -> Tensor:
        """Returns elements `box` of a tensor that was written as one piece, in memory that is mapped from its file.

        Do not write to them. Raises DamagedError for a wrong checksum.
        """
        record = self.manifest.tensors[name]
        chunk = record.chunks[0]
        if len(record.chunks) != 1:
            raise DamagedError(f"{self._path}: {name} is in {len(record.chunks)} pieces, and was written as one")
        return self._file(chunk.file).read(chunk.key, chunk.dtype, record.shape, chunk.crc32, box)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = open_tensor_file(self._path / name, self.manifest.files[name])
        return self._files[name]


@dataclass(frozen=True)
class WholeTensor:
    """A tensor to write: `read(box)` returns a rectangle of it, just before it is written and from any thread."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return Box((0,) * len(self.shape), self.shape).numel * self.dtype.itemsize

    def source(self, key: str, on_bytes: Callable[[int], None]) -> TensorSource:
        """Returns the tensor as a source for a file, block by block;
        `on_bytes` is called with the size of each block."""

        def blocks() -> Iterator[Tensor]:
            for box in cut(self.shape, max(1, BLOCK_BYTES // self.dtype.itemsize)):
                block = self.read(box)
                yield block
                on_bytes(block.nbytes)

        return TensorSource(key, self.dtype, self.shape, blocks)


def write_whole(
    root: Path,
    iteration: int,
    tensors: Sequence[WholeTensor],
    state: dict[str, Any],
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Writes a checkpoint `root`/iter_... of `tensors` and `state` (any JSON). Raises OSError, leaving nothing behind.

    Memory: two blocks, for tensors of any size.
    """
    temporary = begin(root, iteration)
    try:
        files = fill_files(tensors, FILE_BYTES)
        names = [f"__0_{number}.safetensors" for number in range(len(files))]

        def write(name: str, held: Sequence[WholeTensor]) -> dict[str, tuple[str, ...]]:
            keys = [chunk_key(tensor.name, (0,) * len(tensor.shape)) for tensor in held]
            return write_tensor_file(
                temporary / name, [tensor.source(key, on_bytes) for key, tensor in zip(keys, held, strict=True)]
            )

        records = {}
        with ThreadPoolExecutor(WRITERS) as pool:
            for name, held, crcs in zip(names, files, pool.map(write, names, files), strict=True):
                for tensor in held:
                    box = Box((0,) * len(tensor.shape), tensor.shape)
                    key = chunk_key(tensor.name, box.offset)
                    chunk = Chunk(box, name, crcs[key], key, tensor.dtype)
                    records[tensor.name] = TensorRecord(tensor.shape, tensor.dtype, (chunk,))
        sizes = {name: (temporary / name).stat().st_size for name in names}
        write_manifest(temporary, Manifest(iteration, records, sizes, state, torch.__version__))
        return publish(root, iteration, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def fill_files(tensors: Sequence[WholeTensor], most: int) -> list[list[WholeTensor]]:
    """Divides a list of tensors, in order, into files of at most `most` bytes;
    a larger tensor has a file of its own."""
    files: list[list[WholeTensor]] = []
    filled = 0
    for tensor in tensors:
        if not files or filled + tensor.nbytes > most:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def cut(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yields rectangles of at most `most` elements that are consecutive in the row-major order of a tensor of
    `shape`."""
    if not shape:
        yield Box((), ())
        return
    row = Box(shape[1:], shape[1:]).numel
    if row > most:
        for first in range(shape[0]):
            for box in cut(shape[1:], most):
                yield Box((first, *box.offset), (1, *box.shape))
        return
    rows = max(1, most // max(1, row))
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))
