"""Activation offload: tensors that a forward saves are kept in host memory until its backward, as a policy decides.

[Note: per-microbatch and per-layer offload]
A pipeline's schedule offloads all tensors of one microbatch in a stage at a time, by its OFFLOAD and RELOAD actions
(schedule/offload_pass.py). Each copy is overlapped with a computation of the rank, forward or backward.

Where a backward follows too soon for that (always without a pipeline, and on its last ranks), and for policies that
name layers or modules, a group holds the tensors of one layer. It is offloaded during the next layer's forward, so
memory is freed while the stage's forward still runs. In backward, the first read of a layer's tensors starts the reload
of the layer before it, which is overlapped with one layer's backward. The last two layers stay on the device, see
RESIDENT_LAYERS.

[Note: tensors that are not offloaded] Parameters, buffers of the model and the batch are in memory anyway. Of a sharded
or offloaded parameter, autograd keeps a reference to the parameter only: backward unshards it again, perhaps at another
address. Tensors of another device stay. A storage that several layers save is offloaded with the last of them, whose
backward comes first; so a storage that all layers save (rotary tables) stays.

The input of a stage is a leaf, which the pipeline engine keeps for its gradient. The stage computes on an alias of it,
and the leaf itself loses its memory after the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.device import with_number
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import OffloadPolicy
from megatron.core.offload.saved_tensors import SavedParameter, SavedView, StorageGroup, StorageIndex

SavedHandle = Tensor | SavedView | SavedParameter  # kept by autograd in place of a saved tensor


class ActivationOffload:
    """Offloads tensors that forwards save. Implements the engine's OFFLOAD and RELOAD actions.

    saved_bytes: bytes that one microbatch of each stage saved last. offloaded_bytes: total of all offloads so far.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        engine: CopyEngine,
        pool: HostPool,
        model: nn.Module,
        layers_of_stage: Mapping[int, int],
        device: torch.device,
        parameter_of: Callable[[Tensor], Tensor | None] = lambda tensor: None,
    ) -> None:
        """`layers_of_stage`: number of layers of each stage of this rank. `device`: only tensors of this device are
        offloaded. `parameter_of`: the sharded or offloaded parameter that a tensor is a view of, or None."""
        self.policy, self.pool, self.saved_bytes, self.offloaded_bytes = policy, pool, dict[int, int](), 0
        self.layers_of_stage, self.device = layers_of_stage, with_number(device)
        self._engine, self._model, self.parameter_of = engine, model, parameter_of
        self._scheduled: frozenset[tuple[int, int]] = frozenset()
        self._groups: dict[tuple[int, int], StorageGroup] = {}  # of microbatches whose backward is still to come
        self._resident: set[int] = set()  # storages that are never offloaded
        self._forward: _StageForward | None = None
        # Groups whose offload started before the last computation and since then.
        self._started_before: list[StorageGroup] = []
        self._started_since: list[StorageGroup] = []

    def begin_step(self, scheduled: frozenset[tuple[int, int]], batch: Iterable[Tensor]) -> None:
        """scheduled: (stage, microbatch) pairs that the schedule's actions offload. batch: tensors that live through
        the step."""
        self._scheduled = scheduled
        # Memory of a sharded or offloaded parameter may be an activation's a moment later, and so may be the address of
        # the empty storage that it has while it is not on the device.
        parameters = (parameter for parameter in self._model.parameters() if self.parameter_of(parameter) is None)
        storages = (tensor.untyped_storage() for tensor in (*parameters, *self._model.buffers(), *batch))
        self._resident = {storage._cdata for storage in storages if storage.nbytes()}

    def end_step(self) -> None:
        """Wait for all copies and free all host memory."""
        self._begin_computation()
        self._begin_computation()
        self._groups.clear()
        self.pool.reclaim()

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Iterator[Tensor | None]:
        """Run the forward of a stage in the body, on the yielded alias of `received`."""
        self._begin_computation()
        alias: Tensor | None = None if received is None else _Alias.apply(received)
        scheduled = (stage, microbatch) in self._scheduled
        name = f"{microbatch} of stage {stage}"
        self._forward = _StageForward(name, self, stage, self.layers_of_stage[stage], scheduled=scheduled)
        with saved_tensors_hooks(self._pack, _unpack):
            yield alias
        forward, self._forward = self._forward, None
        self.saved_bytes[stage] = forward.saved
        if scheduled:
            self._groups[stage, microbatch] = forward.group
        else:
            forward.end_layer()
            self._started_since += forward.started
        if received is not None:
            received.data = received.new_empty(1).expand(received.shape)

    def begin_backward(self) -> None:
        """Call before every backward, or half of a split one."""
        self._begin_computation()

    def next_layer(self) -> None:
        """Call before every layer's forward. Does nothing for a layer that is recomputed in backward."""
        if self._forward is not None:
            self._forward.next_layer()

    def offload(self, stage: int, microbatch: int) -> None:
        """Start to offload a microbatch's share; its device memory is freed after the next computation."""
        group = self._groups[stage, microbatch]
        self.start(group, int(self.policy.schedule_ratio * group.offloadable))
        self._started_since.append(group)

    def reload(self, stage: int, microbatch: int) -> None:
        """Start to reload a microbatch's share; its readers wait for it. Frees the memory of finished offloads
        first."""
        self._finish_offloads()
        self._groups.pop((stage, microbatch)).reload()

    def start(self, group: StorageGroup, nbytes: int) -> None:
        """Start to offload `nbytes` bytes of a group."""
        group.start_offload(nbytes)
        self.offloaded_bytes += nbytes

    def new_group(self, name: str, before: StorageGroup | None) -> StorageGroup:
        """A new group. When backward first reads it, the reload of the group `before` it starts."""
        return StorageGroup(name, self._engine, self.pool, None if before is None else before.reload)

    def is_resident(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves must stay as it is."""
        return (
            isinstance(tensor, nn.Parameter)
            or tensor.device != self.device
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.untyped_storage().nbytes() == 0
            or tensor.untyped_storage()._cdata in self._resident
        )

    def _pack(self, tensor: Tensor) -> SavedHandle:
        """Autograd keeps this bound method with every tensor, so `self` must not refer to saved tensors afterwards."""
        assert self._forward is not None
        return self._forward.pack(tensor)

    def _begin_computation(self) -> None:
        """Free the memory of offloads that started before the last computation, after waiting for them."""
        self._finish_offloads()
        self._started_before, self._started_since = self._started_since, []

    def _finish_offloads(self) -> None:
        for group in self._started_before:
            group.finish_offload()
        self._started_before = []


class _StageForward:
    """The running forward of a stage.

    group: the group that saved tensors belong to now. started: the last layer's group, whose offload has started.
    saved: bytes so far.
    """

    def __init__(self, name: str, owner: ActivationOffload, stage: int, num_layers: int, *, scheduled: bool) -> None:
        """`scheduled`: the schedule's actions offload the whole microbatch, so layers are not offloaded one by one."""
        self._stage = stage
        self.group, self.started, self.saved = owner.new_group(name, None), list[StorageGroup](), 0
        self._name, self._owner, self._num_layers, self._scheduled = name, owner, num_layers, scheduled
        self._index, self._groups = StorageIndex(), [self.group]
        self._layer: int | None = None  # None before the first layer, to whose group earlier tensors belong
        self._due = 0.0  # bytes that should have been offloaded so far

    def pack(self, tensor: Tensor) -> SavedHandle:
        """The handle that autograd keeps in place of a tensor that it saves."""
        if (parameter := self._owner.parameter_of(tensor)) is not None:
            offset = int(tensor.storage_offset()) - int(parameter.storage_offset())
            return SavedParameter(parameter, tensor.shape, tensor.stride(), offset)
        if self._owner.is_resident(tensor):
            return tensor
        storage = tensor.untyped_storage()
        device_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        saved, offloadable = self._index.find(storage), self._owner.policy.is_offloadable()
        if saved is None:
            saved = self.group.add(device_bytes, offloadable=offloadable)
            self._index.add(storage, saved)
            self.saved += saved.nbytes
        else:
            if saved.group is not self.group:
                self.group.take_over(saved, device_bytes)
            saved.offloadable = saved.offloadable or offloadable
        return SavedView(saved, self.group, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def next_layer(self) -> None:
        """A layer's forward is about to run."""
        if self._layer is None:
            self._layer = 0
        elif not self._scheduled:
            self.end_layer()
            self._layer += 1
            self.group = self._owner.new_group(f"{self._name}, layer {self._layer}", self.group)
            self._groups.append(self.group)

    def end_layer(self) -> None:
        """Start to offload this layer's share, and free the memory of the previous layer's offloaded storages."""
        for group in self.started:
            group.finish_offload()
        offloadable = self.group.offloadable
        ratio = self._owner.policy.layer_ratio(self._stage, self._layer or 0, self._num_layers)
        self._due += ratio * offloadable
        # Meets the ratio exactly over all layers: a later layer makes up for one that could not offload enough.
        offloaded = sum(group.offloaded for group in self._groups)
        nbytes = max(0, min(int(self._due) - offloaded, offloadable)) if ratio else 0
        self._owner.start(self.group, nbytes)
        self.started = [self.group]


def attach_to_layers(offload: ActivationOffload, layers: Iterable[nn.Module]) -> None:
    """Tell `offload` where each layer begins, by hooks: layers know nothing of offload."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: offload.next_layer())


class _Alias(torch.autograd.Function):
    """The same memory as another tensor, with the gradient passed through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _unpack(handle: SavedHandle) -> Tensor:
    return handle if isinstance(handle, Tensor) else handle.tensor()
