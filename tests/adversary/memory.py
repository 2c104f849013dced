"""Agents, the order of what they do, and the accesses to memory that no event orders."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import megatron.base

Clock = Mapping[int, int]  # number of an agent -> what is known to be over of it: all accesses up to this time
Place = tuple[CodeType, int] | None  # a line of megatron/

_PACKAGE = Path(megatron.base.__file__).parents[1]
_NUMBERS = itertools.count()
_SWEEP = 2000  # new storages between two sweeps for freed ones


class Race(AssertionError):
    """Two accesses that no event orders, memory that was freed too early, or work that nothing waited for."""


@dataclass(slots=True)
class Title:
    """The name of an agent, which may become known after its first accesses."""

    text: str


class Agent:
    """Something whose accesses are in order: compute, the host, an operation, a transfer.

    clock: what it knows of every agent: the vector clocks of Mattern (1989) and Fidge (1988), as in CUDA's race
    checkers.
    """

    def __init__(self, title: str, clock: Clock | None = None) -> None:
        self.title, self.number = Title(title), next(_NUMBERS)
        self.clock: dict[int, int] = {**(clock or {}), self.number: 1}
        self.touched: dict[int, StorageWeakRef] = {}  # storages that it did not allocate itself

    def release(self) -> Clock:
        """Everything up to now, for others to be ordered behind."""
        known = dict(self.clock)
        self.clock[self.number] += 1
        return known

    def join(self, known: Clock) -> None:
        """Order everything from now on behind `known`."""
        mine = self.clock
        for number, time in known.items():
            if mine.get(number, 0) < time:
                mine[number] = time


@dataclass(frozen=True, slots=True)
class Access:
    """An access to bytes start .. stop of a storage, at a time of an agent."""

    start: int
    stop: int
    agent: int
    time: int
    writes: bool
    title: Title  # of the agent
    what: str
    place: Place


@dataclass(slots=True)
class _Storage:
    ref: StorageWeakRef
    owner: int | None  # the agent that allocated it, if that was seen
    host: bool
    accesses: list[Access] = field(default_factory=list)


class Memory:
    """The accesses to every storage that a later one may be in a race with. Any thread may use it."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._lock = threading.RLock()
        self._next_sweep = _SWEEP
        self._knows_host = False  # whether any tensor is known to be in host memory

    def access(self, tensor: Tensor, agent: Agent, what: str, *, writes: bool) -> None:
        """Record an access. Raises Race."""
        if tensor.numel() == 0:
            return
        with self._lock:
            storage = self._find(tensor)
            if storage.owner != agent.number:
                agent.touched.setdefault(storage.ref.cdata, storage.ref)
            start, stop = _extent(tensor)
            known, left = agent.clock, []
            this = Access(start, stop, agent.number, known[agent.number], writes, agent.title, what, _place())
            for other in storage.accesses:
                ordered = known.get(other.agent, 0) >= other.time
                if not ordered and (writes or other.writes) and other.start < stop and start < other.stop:
                    raise Race(_message(tensor, this, other))
                covered = start <= other.start and other.stop <= stop
                if not (ordered and covered and (writes or not other.writes)):  # else this one stands for it
                    left.append(other)
            left.append(this)
            storage.accesses = left

    def allocated(self, tensor: Tensor, agent: Agent, *, host: bool) -> None:
        """Note that the agent allocated the tensor's storage just now; in host memory or not."""
        with self._lock:
            storage = self._find(tensor)
            storage.owner, storage.host = agent.number, host
            agent.touched.pop(storage.ref.cdata, None)

    def put_on_host(self, tensor: Tensor) -> None:
        """Note that the tensor is in host memory."""
        with self._lock:
            self._find(tensor).host = self._knows_host = True

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is known to be in host memory."""
        if not self._knows_host:
            return False
        with self._lock:
            return self._find(tensor).host

    def _find(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None or found.ref.expired():  # another storage may have had this address
            found = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage), None, False)
            if len(self._storages) > self._next_sweep:
                self._storages = {key: each for key, each in self._storages.items() if not each.ref.expired()}
                self._next_sweep = len(self._storages) + _SWEEP
        return found


class Weak:
    """A tensor that this does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._device = tensor.dtype, tensor.device
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """The tensor, or None when its storage was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """(first byte, byte after the last) of a tensor in its storage."""
    start = tensor.storage_offset() * tensor.itemsize
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _message(tensor: Tensor, this: Access, other: Access) -> str:
    kind = " ".join(("x".join(map(str, tensor.shape)) or "scalar", str(tensor.dtype)))
    return f"race: {_told(this, f'a tensor ({kind})')}; {_told(other, 'it')}, and no event orders the two"


def _told(access: Access, tensor: str) -> str:
    verb, where = "writes" if access.writes else "reads", ""
    if access.place is not None:
        code, line = access.place
        where = f" at {Path(code.co_filename).name}:{line} ({code.co_name})"
    return f"{access.title.text} {verb} {tensor} by {access.what}{where}"


def _place() -> Place:
    """The line of megatron/ that is running."""
    frame = sys._getframe(1)
    while frame is not None and not _is_ours(frame.f_code):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


@functools.cache
def _is_ours(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(_PACKAGE)
