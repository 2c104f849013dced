"""Tensors that a forward saves for its backward, as groups of storages that are offloaded and reloaded together.

[Note: storages are offloaded, not tensors] Autograd saves tensors: often several views of one storage, with any
strides. Memory is taken by the storage, and any of its views keeps it alive. So a group counts each storage once,
copies it as plain bytes, and rebuilds the views in the reloaded storage. Memory is freed by dropping references, never
by resizing a storage: a message that is still being sent, or a tensor that another object holds, keeps its memory.

[Note: exactly the ratio] Of a group of n bytes, floor(ratio x n) are offloaded. Whole storages are chosen, large ones
first, and one more is split: its head is offloaded, its tail stays in a tensor of its own, and both are joined again in
the reloaded storage.

[Note: freeing reloaded storages] Each storage is reloaded into memory of its own, which only the saved tensors refer
to. So backward frees it node by node, as it does without offload. A split backward drops the storages that only its
input gradient needed; its deferred weight gradients hold the inputs of linear layers that they still need. A staging
buffer would live as long as the last tensor in it; double buffering here lies in the order of copies alone: while
backward reads one group, one other is reloaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.offload.copy_engine import CopyEngine, TensorPair
from megatron.core.offload.host_pool import HostBlock, HostPool
from megatron.core.streams.stream import Work


class SavedStorage:
    """One storage that autograd saves.

    device_bytes: uint8 [nbytes] on the device, or None while a part of it is offloaded. head: bytes that are offloaded.
    start: where they begin in the group's block. tail: the rest, while the head is offloaded.
    """

    def __init__(self, device_bytes: Tensor, group: StorageGroup, *, offloadable: bool) -> None:
        self.device_bytes: Tensor | None = device_bytes
        self.nbytes, self.device = device_bytes.numel(), device_bytes.device
        self.group, self.offloadable = group, offloadable
        self.head, self.start = 0, 0
        self.tail: Tensor | None = None
        self.reload: Work | None = None

    def on_device(self) -> torch.UntypedStorage:
        """The storage on the device. Waits for its reload, and starts it if nothing else has."""
        if self.device_bytes is None:
            self.group.reload()
        if self.reload is not None:
            self.reload.wait()
            self.reload = self.tail = None
        assert self.device_bytes is not None
        return self.device_bytes.untyped_storage()


@dataclass(frozen=True, slots=True)
class SavedView:
    """The handle that autograd keeps in place of a saved tensor: a view of a storage."""

    storage: SavedStorage
    group: StorageGroup  # the group that saved it; another one may offload the storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The saved tensor, on the device."""
        self.group.enter_backward()
        storage = self.storage.on_device()
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """The handle that autograd keeps in place of a view of a sharded or offloaded parameter, without its memory.

    Autograd hands hooks an alias of a leaf, which would keep the whole bucket alive until backward.
    """

    parameter: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the parameter's beginning

    def tensor(self) -> Tensor:
        """The view in the parameter's present memory. Backward has unsharded the parameter before."""
        data = self.parameter.detach()
        assert data.numel(), f"backward reads a parameter that is not on the device: {self}"
        return data.as_strided(self.shape, self.stride, int(data.storage_offset()) + self.offset)


class StorageGroup:
    """Storages that are offloaded together and reloaded together: those of a microbatch in a stage, or of one layer of
    it.

    total, offloaded: bytes of all storages, and of those that are offloaded.
    """

    def __init__(
        self, name: str, engine: CopyEngine, pool: HostPool, on_backward: Callable[[], None] | None = None
    ) -> None:
        """`on_backward`: called when backward first reads a tensor of the group."""
        self.name, self.total, self.offloaded = name, 0, 0
        self._engine, self._pool, self._on_backward = engine, pool, on_backward
        self._storages: list[SavedStorage] = []
        self._block: HostBlock | None = None
        self._offload: Work | None = None

    def add(self, device_bytes: Tensor, *, offloadable: bool) -> SavedStorage:
        """Add a new storage, given as uint8 [nbytes]."""
        storage = SavedStorage(device_bytes, self, offloadable=offloadable)
        self._storages.append(storage)
        self.total += storage.nbytes
        return storage

    @property
    def offloadable(self) -> int:
        """Bytes that may be offloaded. Valid before `start_offload`."""
        return sum(storage.nbytes for storage in self._storages if storage.offloadable)

    def take_over(self, storage: SavedStorage, device_bytes: Tensor) -> None:
        """Move a storage, which an earlier group has saved as well, to this group, whose backward comes first."""
        before = storage.group
        before._storages = [other for other in before._storages if other is not storage]
        before.offloaded -= storage.head
        # It was saved a second time from device memory, wherever the earlier group was to put it.
        storage.device_bytes, storage.tail, storage.head, storage.group = device_bytes, None, 0, self
        self._storages.append(storage)

    def enter_backward(self) -> None:
        """Backward reads a tensor of the group."""
        if self._on_backward is not None:
            callback, self._on_backward = self._on_backward, None
            callback()

    def start_offload(self, nbytes: int) -> None:
        """Start to copy exactly `nbytes` bytes of offloadable storages to the host."""
        offloadable = [storage for storage in self._storages if storage.offloadable]
        for storage, head in zip(offloadable, split([each.nbytes for each in offloadable], nbytes), strict=True):
            storage.head = head
        if nbytes == 0:
            self._storages = []  # only autograd refers to them now
            return
        self._block = self._pool.take(nbytes)
        pairs, start = list[TensorPair](), 0
        for storage in offloadable:
            if storage.head:
                assert storage.device_bytes is not None
                storage.start, start = start, start + storage.head
                pairs.append((storage.device_bytes[: storage.head], self._block.bytes[storage.start : start]))
        self._storages = [storage for storage in offloadable if storage.head]
        self._offload, self.offloaded = self._engine.to_host(self.name, pairs, self._block), nbytes

    def finish_offload(self) -> None:
        """Wait for the copy to the host and free the device memory of the offloaded bytes."""
        if self._offload is None:
            return
        self._offload.wait()
        self._offload = None
        for storage in self._storages:
            assert storage.device_bytes is not None
            if storage.head < storage.nbytes:
                storage.tail = storage.device_bytes[storage.head :].clone()
            storage.device_bytes = None

    def reload(self) -> None:
        """Start to copy the group back to the device. If its memory there is not freed yet, nothing is copied."""
        if self._block is None:
            return
        storages, block, self._storages, self._block = self._storages, self._block, [], None
        if self._offload is not None:
            self._offload.wait()
            self._offload = None
        else:
            self._start_reload(storages, block)
        self._pool.give_back(block)

    def _start_reload(self, storages: Iterable[SavedStorage], block: HostBlock) -> None:
        pairs, reloaded = list[TensorPair](), list[SavedStorage]()
        for storage in storages:
            device_bytes = torch.empty(storage.nbytes, dtype=torch.uint8, device=storage.device)
            pairs.append((block.bytes[storage.start : storage.start + storage.head], device_bytes[: storage.head]))
            if storage.tail is not None:
                pairs.append((storage.tail, device_bytes[storage.head :]))
            storage.device_bytes = device_bytes
            reloaded.append(storage)
        copy = self._engine.to_device(self.name, pairs, block)
        for storage in reloaded:
            storage.reload = copy


def split(sizes: Sequence[int], nbytes: int) -> list[int]:
    """How many bytes of each storage to offload, `nbytes` in all: large ones whole while they fit, then a head of a
    small one."""
    heads, left = [0] * len(sizes), nbytes
    by_size = sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True)
    for number in by_size:
        if sizes[number] <= left:
            heads[number] = sizes[number]
            left -= sizes[number]
    if left:
        # All storages that did not fit are larger than the rest.
        smallest = next(number for number in reversed(by_size) if not heads[number])
        heads[smallest] = left
    return heads


class StorageIndex:
    """Finds the SavedStorage of a storage that one forward has saved before, without keeping the storage alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], SavedStorage]] = {}

    def find(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """None for a new storage, though it may have the address of a freed one."""
        entry = self._known.get(storage._cdata)
        return None if entry is None or entry[0]() is None else entry[1]

    def add(self, storage: torch.UntypedStorage, saved: SavedStorage) -> None:
        """Remember the storage while it lives."""
        self._known[storage._cdata] = (weakref.ref(storage), saved)
