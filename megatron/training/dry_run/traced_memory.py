"""Follows the memory of tensors that have none: every storage that a traced operation makes, until it is freed."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.comm.simulated import collective_result, is_collective

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations and temporary"
TRACED_KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
_META = torch.device("meta")
ROUNDED = 512  # bytes that CUDA's caching allocator rounds a tensor up to


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A reference to a storage, which forgets nothing when the storage is freed."""

    __slots__ = ("key", "kind", "nbytes")
    key: int
    kind: str
    nbytes: int


class TracedMemory(TorchDispatchMode):
    """Bytes of tensors on one device, now and at most, by kind. Active as a context manager, around a FakeTensorMode.

    operations: so far. host_reads: how often the host has asked for values, or copied them and waited; numbers of the
    device are zero. top: bytes by kind at the peak, and moment its name.
    """

    def __init__(self, device: torch.device, doing: Callable[[], str]) -> None:
        """device: a CUDA device. doing: names the present moment."""
        super().__init__()
        self._device, self._doing = device, doing
        self._storages: dict[int, _Storage] = {}
        self.now: Counter[str] = Counter()
        self.allocated = self.peak = 0
        self.top: Counter[str] = Counter()
        self.moment = ""
        self.operations = self.host_reads = 0
        self._copied: Any = None  # the storage in host memory that was read last

    def restart(self) -> None:
        """Forgets the peak and the counts."""
        self.peak, self.operations, self.host_reads = 0, 0, 0
        self._raise_peak()

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on counts the memory of these tensors as `kind`."""
        for tensor in tensors:
            entry = self._storages.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.now[entry.kind] -= entry.nbytes
                self.now[kind] += entry.nbytes
                entry.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and follows the storages of its results."""
        if func is torch.ops.prim.device.default:
            return _META if args[0].device.type == "cuda" else args[0].device
        self.operations += 1
        result = self._run(func, args, kwargs or {})
        if isinstance(result, Tensor):
            self._follow(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self._follow(item)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") == _META:  # from below Python, for the device of another tensor
            of_tensors = (arg.device for arg in args if isinstance(arg, Tensor))
            kwargs = {**kwargs, "device": next(of_tensors, self._device)}
        if is_collective(func):
            return collective_result(func, args)
        if func in _SETS:
            return _set(func, args, kwargs)
        if func in _PRODUCTS:
            return _product(*[arg for arg in args if isinstance(arg, Tensor)][-2:], out=kwargs["out"])
        if func is not torch.ops.aten._local_scalar_dense.default:
            self.host_reads += _is_blocking_copy(func, args, kwargs)
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)  # of a constant
        except DataDependentOutputException:
            self._count_read(args[0])
            return 0.0 if args[0].is_floating_point() else 0

    def _count_read(self, tensor: Tensor) -> None:
        """Counts numbers of one tensor in host memory once, if they are read one after the other:
        they came together."""
        storage = None if tensor.device == self._device else tensor.untyped_storage()
        self.host_reads += storage is None or self._copied is None or storage._cdata != self._copied._cdata
        self._copied = storage

    def _follow(self, tensor: Tensor) -> None:
        if tensor.device != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        entry = _Storage(storage, functools.partial(_freed, weakref.ref(self)))
        entry.key, entry.kind, entry.nbytes = key, ACTIVATIONS, -(-storage.nbytes() // ROUNDED) * ROUNDED
        self._storages[key] = entry
        self.now[ACTIVATIONS] += entry.nbytes
        self.allocated += entry.nbytes
        if self.allocated > self.peak:
            self._raise_peak()

    def _raise_peak(self) -> None:
        self.peak, self.top, self.moment = self.allocated, Counter(self.now), self._doing()

    def _forget(self, storage: _Storage) -> None:
        if self._storages.get(storage.key) is storage:
            del self._storages[storage.key]
        self.now[storage.kind] -= storage.nbytes
        self.allocated -= storage.nbytes


def _is_blocking_copy(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for numbers that an operation copies from a device."""
    if func is torch.ops.aten._to_copy.default:
        to, blocking = torch.device(kwargs.get("device") or args[0].device), not kwargs.get("non_blocking")
        return blocking and args[0].device.type == "cuda" and to.type == "cpu"
    if func is torch.ops.aten.copy_.default:
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return blocking and args[1].device.type == "cuda" and args[0].device.type == "cpu"
    return False


# With an output of another dtype these have no rule for tensors without memory.
_PRODUCTS = (torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out)


# The cache of FakeTensorMode would keep the storage that is their argument.
_SETS = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    mode = args[0].fake_mode
    cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        return func(*args, **kwargs)
    finally:
        mode.cache_enabled = cached


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """a [n, k] x b [k, m], written or added to out [n, m]."""
    assert a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1]) and a.dtype == b.dtype
    return out


def _freed(memory: weakref.ref[TracedMemory], storage: _Storage) -> None:
    alive = memory()
    if alive is not None:
        alive._forget(storage)
