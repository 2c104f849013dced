"""Reads a folder that torch.distributed.checkpoint wrote, in one process: any rectangle of its tensors, and its
objects.

The format is `.metadata`, a pickle that maps each chunk of each tensor to its location, and `__{rank}_{n}.distcp` files
of concatenated chunks, each written by torch.save. The bytes are read by torch's FileSystemReader, the pickles by
pickles.py.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from megatron.base.box import Box, intersect
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.pickles import Record, RecordUnpickler, check_zip, load_objects, unreadable
from megatron.core.dist_checkpointing.tensor_file import narrow

METADATA = ".metadata"
# Megatron-LM 0.15 wrote its own subclass of Metadata, and others keep the plans of the save in it.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    _MEGATRON,
    "pathlib",
    "pathlib._local",
)
_HELD_BYTES = 2**28  # the total size of chunks kept for further reads: a chunk is always read as a whole


class DcpFolder:
    """The tensors and objects of a folder. `tensors`: name -> (global shape, dtype). `objects`: names of all other
    values.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a folder that is not such a checkpoint, or with missing or truncated files."""
        self._path = path
        metadata = _read_metadata(path / METADATA)
        self._saved = metadata.state_dict_metadata
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._check_files()
        entries = self._saved.items()
        self.tensors = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = {name for name, entry in entries if isinstance(entry, BytesStorageMetadata)}
        self._held: OrderedDict[tuple[str, tuple[int, ...]], Tensor] = OrderedDict()

    def read(self, name: str, box: Box) -> Tensor:
        """Returns elements `box` of tensor `name` in its own dtype, in new memory. Raises CheckpointError."""
        entry = self._saved[name]
        assert isinstance(entry, TensorStorageMetadata)
        out = torch.empty(box.shape, dtype=entry.properties.dtype)
        covered = 0
        for chunk in entry.chunks:
            whole = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if common := intersect(whole, box):
                part = narrow(self._chunk(name, whole), common.within(whole))
                narrow(out, common.within(box)).copy_(part)
                covered += common.numel
        if covered != box.numel:
            raise CheckpointError(
                f"{self._path} is damaged: of elements {box} of tensor {name} it holds {covered} of {box.numel}"
            )
        return out

    def read_object(self, name: str) -> Any:
        """Returns object `name`, as pickles.py reads it. Raises CheckpointError."""
        planner = _Planner()
        index = MetadataIndex(name)
        self._run(ReadItem(LoadItemType.BYTE_IO, index, torch.Size(()), index, torch.Size(()), torch.Size(())), planner)
        assert planner.bytes is not None
        return load_objects(planner.bytes, f"{self._path}: {name}")

    def _chunk(self, name: str, whole: Box) -> Tensor:
        """Returns a whole chunk, which is cached while there is room."""
        key = (name, whole.offset)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        entry = self._saved[name]
        assert isinstance(entry, TensorStorageMetadata)
        planner = _Planner()
        planner.target = torch.empty(whole.shape, dtype=entry.properties.dtype)
        index, zeros = MetadataIndex(name, whole.offset), torch.Size(0 for _ in whole.shape)
        item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size(whole.shape))
        self._run(item, planner)
        self._held[key] = planner.target
        while len(self._held) > 1 and sum(tensor.nbytes for tensor in self._held.values()) > _HELD_BYTES:
            self._held.popitem(last=False)
        return planner.target

    def _run(self, item: ReadItem, planner: _Planner) -> None:
        place = self._reader.storage_data[item.storage_index]
        file = place.relative_path
        try:
            if item.type is LoadItemType.TENSOR:  # load_objects checks the others
                with open(self._path / file, "rb") as content:
                    content.seek(place.offset)
                    check_zip(io.BytesIO(content.read(place.length)))
            self._reader.read_data(LoadPlan([item]), planner)
        except Exception as error:  # a damaged file can make torch raise anything
            raise unreadable(f"{self._path / file}: {item.storage_index.fqn}", error) from error

    def _check_files(self) -> None:
        """Checks that all files are complete and that every chunk has a location in one of them."""
        ends: dict[str, int] = {}
        for place in self._reader.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            file = self._path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            if file.stat().st_size < end:
                raise CheckpointError(f"{file} is damaged: it has {file.stat().st_size} bytes, {end} were written")
        for name, entry in self._saved.items():
            offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
            for offset in offsets:
                if MetadataIndex(name, offset) not in self._reader.storage_data:
                    raise CheckpointError(
                        f"{self._path / METADATA} is damaged: it does not contain the position of {name}"
                    )


class _Planner(LoadPlanner):
    """A planner for a single item: a tensor, which is read into `target`, or `bytes`."""

    target: Tensor
    bytes: io.BytesIO | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing, because this planner is never asked for a plan."""

    def create_local_plan(self) -> LoadPlan:
        """Never called."""
        raise AssertionError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Never called."""
        raise AssertionError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Never called."""
        raise AssertionError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keeps the bytes of the object."""
        self.bytes = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the tensor to fill completely."""
        return self.target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing, because `target` is already filled."""


def _read_metadata(path: Path) -> Metadata:
    """Converts the data in the `.metadata` pickle to torch's Metadata."""
    try:
        with open(path, "rb") as file:
            metadata = RecordUnpickler(file, _CLASSES).load()
        saved = {str(name): _entry(entry) for name, entry in metadata["state_dict_metadata"].items()}
        places = {_index(index): _place(place) for index, place in metadata["storage_data"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise unreadable(str(path), error) from error
    return Metadata(saved, storage_data=places)


def _entry(entry: Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in entry["chunks"]]
    dtype = entry["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor has the dtype {dtype!r}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(entry["size"]), chunks)


def _index(index: Record) -> MetadataIndex:
    offset = index.state.get("offset")
    return MetadataIndex(index["fqn"], None if offset is None else _size(offset))


def _place(place: Record) -> _StorageInfo:
    name, numbers = place["relative_path"], (place["offset"], place["length"])
    if not (isinstance(name, str) and Path(name).name == name):  # keeps reads inside the folder
        raise ValueError(f"file name {name!r}")
    if place.state.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or transformed, which is not supported")
    return _StorageInfo(name, *_size(numbers))


def _size(numbers: Any) -> torch.Size:
    if not (isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)):
        raise ValueError(f"{numbers!r} is not a shape")
    return torch.Size(numbers)
