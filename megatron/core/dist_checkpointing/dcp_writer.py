"""Writes folders in the format of torch.distributed.checkpoint from one process, as a stream.

`.metadata` maps each chunk of each global tensor to its location; `__{n}_0.distcp` hold the chunks and the objects,
each as torch.save writes it. torch's FileSystemWriter writes the files, given a plan and a planner that reads each
chunk just before it is written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.base.box import Box
from megatron.core.dist_checkpointing.whole import FILE_BYTES, WRITERS, WholeTensor, cut, fill_files

CHUNK_BYTES = 2**26  # maximum size of a chunk of a tensor: reading a part of a chunk reads all of it


def write_dcp(
    folder: Path,
    tensors: Sequence[WholeTensor],
    objects: Mapping[str, Any],
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes `tensors`, and `objects` as torch.save pickles them, into the empty `folder`, and syncs the files.

    Memory: one chunk for each file that is being written. Raises OSError and the errors of a tensor's `read`; the
    folder is then incomplete, without `.metadata`.
    """
    held = {tensor.name: tensor for tensor in tensors}
    chunks = {
        name: list(cut(tensor.shape, max(1, CHUNK_BYTES // tensor.dtype.itemsize))) for name, tensor in held.items()
    }
    plans = [
        SavePlan([item for tensor in file for item in _items(tensor, chunks[tensor.name])])
        for file in fill_files(tensors, FILE_BYTES)
    ]
    plans.append(SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]))
    planner, writer = _Planner(held, objects, on_bytes), _Writer(folder)

    def write(plan: SavePlan) -> list[WriteResult]:
        results: list[WriteResult] = writer.write_data(plan, planner).wait()
        return results

    with ThreadPoolExecutor(WRITERS) as pool:
        results = list(pool.map(write, writer.prepare_global_plan(plans)))
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [_chunk(box) for box in chunks[name]]
        )
        for name, tensor in held.items()
    }
    entries |= {name: BytesStorageMetadata() for name in objects}
    writer.finish(Metadata(entries), results)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Returns None, because this would contain the name of the temporary folder."""


class _Planner(SavePlanner):
    """Provides the data of each item when it is written; it is never asked for a plan."""

    def __init__(
        self, tensors: Mapping[str, WholeTensor], objects: Mapping[str, Any], on_bytes: Callable[[int], None]
    ) -> None:
        self._tensors, self._objects, self._on_bytes = tensors, objects, on_bytes

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Returns a chunk in new memory, or the bytes of an object."""
        if write_item.tensor_data is None:
            data = io.BytesIO()
            torch.save(self._objects[write_item.index.fqn], data)
            return data
        chunk = write_item.tensor_data.chunk
        tensor = self._tensors[write_item.index.fqn].read(Box(tuple(chunk.offsets), tuple(chunk.sizes)))
        self._on_bytes(tensor.nbytes)
        return tensor

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Never called."""
        raise AssertionError

    def create_local_plan(self) -> SavePlan:
        """Never called."""
        raise AssertionError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Never called."""
        raise AssertionError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Never called."""
        raise AssertionError


def _items(tensor: WholeTensor, chunks: Sequence[Box]) -> list[WriteItem]:
    size, properties = torch.Size(tensor.shape), TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            MetadataIndex(tensor.name, box.offset, number),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), properties, size),
        )
        for number, box in enumerate(chunks)
    ]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
