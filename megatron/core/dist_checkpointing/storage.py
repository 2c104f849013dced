"""Storage of torch.distributed.checkpoint in safetensors files and a JSON manifest, without any pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.coordination import portable
from megatron.core.dist_checkpointing.manifest import (
    Chunk,
    Manifest,
    TensorRecord,
    check_sizes,
    chunk_key,
    write_manifest,
)
from megatron.core.dist_checkpointing.tensor_file import (
    DamagedError,
    TensorSource,
    open_tensor_file,
    write_tensor_file,
)

Working = Callable[[str], AbstractContextManager[None]]
FILE_BYTES = 2**30  # a rank begins a new file above this size; a tensor is never split over files
_WRITERS = 2  # files in flight per rank: one is synced while the next is filled


@dataclass(frozen=True)
class _Written:
    chunk: Chunk
    file_bytes: int


class SafetensorsWriter:
    """Writes this rank's chunks to `folder`/__{rank}_{n}.safetensors; the first rank then writes metadata.json."""

    def __init__(
        self, folder: Path, iteration: int, rank: int, state: dict[str, Any], fetch: Callable[[WriteItem], Tensor]
    ) -> None:
        """`folder` exists and is empty, on a file system that all ranks share. `state` is any JSON value. fetch: returns
        the data of an item of the plan.
        """
        self._folder = folder
        self._iteration = iteration
        self._rank = rank
        self._state = state
        self._fetch = fetch

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Writes and syncs this rank's files before it returns."""
        files = _split(plan.items)
        with portable(), ThreadPoolExecutor(_WRITERS) as pool:
            written = pool.map(self._write_file, range(len(files)), files)
            return [result for file in written for result in file]

    def manifest(self, metadata: Metadata, results: Iterable[WriteResult]) -> Manifest:
        """Returns the content of metadata.json. results: of all ranks."""
        return _manifest(self._iteration, metadata, results, self._state)

    def finish(self, manifest: Manifest) -> None:
        """Writes metadata.json on the first rank, after all ranks' files are on disk, and syncs the folder."""
        with portable():
            try:
                check_sizes(self._folder, manifest)
            except DamagedError as error:
                # Its writer has just synced this file, so a rank that does not see it has another disk.
                raise CheckpointError(
                    f"{error}, as the first rank sees it; save to a folder that all hosts share"
                ) from None
            write_manifest(self._folder, manifest)
            sync_folder(self._folder)

    def _write_file(self, number: int, items: Sequence[WriteItem]) -> list[WriteResult]:
        path = self._folder / f"__{self._rank}_{number}.safetensors"
        boxes = {_key(item): _box(item) for item in items}
        sources = [
            TensorSource(key, _dtype(item), boxes[key].shape, partial(self._blocks, item))
            for key, item in zip(boxes, items)
        ]
        checksums = write_tensor_file(path, sources)
        file_bytes = path.stat().st_size
        return [
            WriteResult(
                item.index,
                source.nbytes,
                _Written(Chunk(boxes[key], path.name, checksums[key], key, source.dtype), file_bytes),
            )
            for (key, item), source in zip(zip(boxes, items), sources)
        ]

    def _blocks(self, item: WriteItem) -> list[Tensor]:
        return [self._fetch(item)]


class SafetensorsReader(StorageReader):
    """Reads parts of chunks from `folder`, described by `manifest`."""

    def __init__(self, folder: Path, manifest: Manifest, working: Working) -> None:
        """working: a context for what this rank does alone while the others wait, by its name."""
        self._folder = folder
        self._manifest = manifest
        self._working = working

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Converts the manifest to torch's Metadata."""
        return Metadata({name: _to_dcp(record) for name, record in self._manifest.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies every part in the plan to its piece, file by file. Raises DamagedError naming a file."""
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index.fqn, item.storage_index.index)
            by_file.setdefault(chunk.file, []).append((item, chunk))
        with self._working("reading its files"), portable():
            for name, wanted in sorted(by_file.items()):
                file = open_tensor_file(self._path(name), self._manifest.files[name])
                for item, chunk in wanted:
                    part = Box(tuple(item.storage_offsets), tuple(item.lengths))
                    saved = file.read(chunk.key, chunk.dtype, chunk.box.shape, chunk.crc32, part)
                    target = planner.resolve_tensor(item)
                    target.copy_(saved)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _chunk(self, name: str, number: int | None) -> Chunk:
        assert number is not None
        return self._manifest.tensors[name].chunks[number]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader serves one load."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the constructor has set up the reader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged: ranks read independently."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: this class is never chosen by path."""
        return False


def verify_files(path: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Reads files of the checkpoint in folder `path`. Raises DamagedError naming the first that is damaged."""
    chunks: dict[str, list[Chunk]] = {}
    for record in manifest.tensors.values():
        for chunk in record.chunks if record.rounded_from is None else ():
            chunks.setdefault(chunk.file, []).append(chunk)
    for file_name in names:
        file = open_tensor_file(path / file_name, manifest.files[file_name])
        for chunk in chunks[file_name]:
            whole = Box((0,) * len(chunk.box.shape), chunk.box.shape)
            file.read(chunk.key, chunk.dtype, chunk.box.shape, chunk.crc32, whole)


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _split(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divides the items into files of about FILE_BYTES, in order."""
    files: list[list[WriteItem]] = []
    filled = 0
    for item in items:
        nbytes = _box(item).numel * _dtype(item).itemsize
        if not files or filled + nbytes > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += nbytes
    return files


def _manifest(iteration: int, metadata: Metadata, results: Iterable[WriteResult], state: dict[str, Any]) -> Manifest:
    chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
    files: dict[str, int] = {}
    for result in results:
        written: _Written = result.storage_data
        chunks[result.index.fqn].append(written.chunk)
        files[written.chunk.file] = written.file_bytes
    tensors = {}
    for name, record in metadata.state_dict_metadata.items():
        assert isinstance(record, TensorStorageMetadata)
        origin = metadata.planner_data.get(name)
        ordered = tuple(sorted(chunks[name], key=lambda c: c.box.offset))
        tensors[name] = TensorRecord(tuple(record.size), record.properties.dtype, ordered, origin)
    return Manifest(iteration, tensors, files, state, torch.__version__)


def _to_dcp(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.box.offset), torch.Size(c.box.shape)) for c in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=record.dtype), torch.Size(record.shape), chunks)


def _key(item: WriteItem) -> str:
    assert item.index.offset is not None
    return chunk_key(item.index.fqn, tuple(item.index.offset))


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype
