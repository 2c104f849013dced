"""Planners of torch.distributed.checkpoint for ShardedTensors: the writes and reads of each rank.

A state dict here maps a global name to this rank's pieces of it. A piece is identified by its position in that list.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor, check_tiling
from megatron.core.dist_checkpointing.tensor_file import DTYPE_CODES

Pieces = dict[str, list[ShardedTensor]]
# Global shape and dtype of a tensor, and the name of the one that it is rounded from, as one rank sees them.
Declared = tuple[tuple[int, ...], torch.dtype, str | None]


def by_name(tensors: Sequence[ShardedTensor]) -> Pieces:
    """Groups pieces by the tensor they belong to."""
    pieces: Pieces = {}
    for piece in tensors:
        pieces.setdefault(piece.name, []).append(piece)
    return pieces


class ShardedSavePlanner(SavePlanner):
    """Every rank writes the pieces for which it is the writer;
    the first rank checks that they form the global tensors."""

    def set_up_planner(
        self, state_dict: Pieces, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Stores this rank's pieces."""
        self._pieces = state_dict

    def create_local_plan(self) -> SavePlan:
        """Returns items for this rank's pieces; `planner_data` declares every name it holds, written here or not."""
        declared = {name: _declaration(pieces) for name, pieces in self._pieces.items()}
        items = [
            _write_item(position, piece)
            for pieces in self._pieces.values()
            for position, piece in enumerate(pieces)
            if piece.is_written
        ]
        return SavePlan(items, planner_data=declared)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Checks all ranks' plans against each other. Raises CheckpointError naming the tensor.

        `planner_data` of the metadata: tensor -> the tensor that it is rounded from.
        """
        declared = agreed([plan.planner_data for plan in all_plans])
        tensors = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, (shape, dtype, _) in declared.items()
        }
        rounded = {name: origin for name, (_, _, origin) in declared.items() if origin is not None}
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
        for name, tensor in tensors.items():
            if name in rounded:
                saved = declared.get(rounded[name])
                assert saved is not None and saved[0] == tuple(tensor.size) and saved[2] is None, f"{name}: {saved}"
            else:
                check_tiling(name, tuple(tensor.size), [_box(chunk) for chunk in tensor.chunks])
        return all_plans, Metadata(dict(tensors), planner_data=rounded)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged, because the caller has chosen the writers."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Returns the piece's data without a copy."""
        assert write_item.index.index is not None
        return self._pieces[write_item.index.fqn][write_item.index.index].data.detach()


class ShardedLoadPlanner(LoadPlanner):
    """Every rank reads, for each of its pieces, the parts of the saved chunks that cover it."""

    def set_up_planner(
        self, state_dict: Pieces, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Stores the pieces to fill and the metadata of the checkpoint."""
        assert metadata is not None
        self._pieces = state_dict
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads for this rank's pieces. Raises CheckpointError naming a tensor that does not fit."""
        items = []
        for name, pieces in self._pieces.items():
            saved = self._saved.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise CheckpointError(_missing(name, list(self._saved)))
            _check_same(name, _declaration(pieces), tuple(saved.size), saved.properties.dtype)
            items += _read_items(name, saved, pieces)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged, because ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called, because checkpoints hold tensors only."""
        raise AssertionError(f"{read_item.dest_index.fqn}: a bytes item in a plan that only has tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the part of the piece that this item fills, as a view."""
        assert read_item.dest_index.index is not None
        target = self._pieces[read_item.dest_index.fqn][read_item.dest_index.index].data.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: `resolve_tensor` returned a view, so the piece is filled already."""


def agreed(declarations: Sequence[dict[str, Declared]]) -> dict[str, Declared]:
    """Returns the union of the ranks' declarations. Raises CheckpointError if two disagree on a tensor's shape or
    dtype.
    """
    union: dict[str, tuple[Declared, int]] = {}
    for rank, declared in enumerate(declarations):
        for name, mine in declared.items():
            theirs, other = union.setdefault(name, (mine, rank))
            if mine != theirs:
                raise CheckpointError(f"{name} is {_text(theirs)} on rank {other} and {_text(mine)} on rank {rank}")
    return {name: declared for name, (declared, _) in union.items()}


def _declaration(pieces: Sequence[ShardedTensor]) -> Declared:
    name, (first, *others) = pieces[0].name, [(p.global_shape, p.data.dtype, p.rounded_from) for p in pieces]
    for other in others:
        if other != first:
            raise CheckpointError(f"{name} has pieces of {_text(first)} and {_text(other)}")
    if first[1] not in DTYPE_CODES:
        raise CheckpointError(
            f"{name} is {first[1]}, which a checkpoint cannot hold; convert it to one of {list(DTYPE_CODES)}"
        )
    return first


def _check_same(name: str, wanted: Declared, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if wanted[0] != shape:
        raise CheckpointError(
            f"{name} is {list(shape)} in the checkpoint and {list(wanted[0])} here; "
            "give the model the shape it was trained with"
        )
    if wanted[1] != dtype:
        raise CheckpointError(
            f"{name} is {dtype} in the checkpoint and {wanted[1]} here; load it as {dtype} and convert it then"
        )


def _missing(name: str, saved: list[str]) -> str:
    return f"{name} is not in the checkpoint, which holds {len(saved)} tensors ({', '.join(sorted(saved)[:3])}, ...)"


def _write_item(position: int, piece: ShardedTensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.data.dtype), torch.Size(piece.global_shape))
    index = MetadataIndex(piece.name, torch.Size(piece.offset), position)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _read_items(name: str, saved: TensorStorageMetadata, pieces: Sequence[ShardedTensor]) -> list[ReadItem]:
    wanted = [ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape) for piece in pieces]
    items = [item for item in create_read_items_for_chunk_list(name, saved, wanted) if math.prod(item.lengths)]
    if sum(math.prod(item.lengths) for item in items) != sum(piece.data.numel() for piece in pieces):
        raise CheckpointError(f"{name}: the checkpoint does not hold every element of {[str(p.box) for p in pieces]}")
    return items


def _box(chunk: Any) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _text(declared: Declared) -> str:
    shape, dtype, origin = declared
    return f"{dtype} {list(shape)}" + ("" if origin is None else f" rounded from {origin}")
