"""Activations wait for their backward in far memory: what is saved is collected here, and moved when a policy says so.

[Note: two grains]
A pipeline's schedule moves the whole of a (stage, microbatch) at a time, by its OFFLOAD and RELOAD actions
(pipeline_parallel/offload_pass.py): each copy has a computation of the rank to hide behind, forward or backward.

Where a backward follows too soon for that, as it always does without a pipeline and on its last ranks, and for policies
that speak of layers and modules, a group is what one layer saves. It goes out beside the next layer's forward, so memory
is given up while the stage's forward still runs. In backward, the first thing that is asked of a layer starts the reload of
the layer before it, which so has one layer's backward to hide behind.
The last two layers stay: the stage needs as much memory either way, for the copy of the last but two is still under way
when the last one runs, and backward finds its first two layers there.

[Note: what does not move]
Parameters, buffers of the model, and the batch: they live anyway. Of a parameter that comes and goes (ZeRO-3, weights in
far memory) it is kept which one it is: backward brings it back, perhaps to another place. Tensors of another device. A
storage that several layers save moves with the last of them, whose backward comes first; what all of them save (rotary
tables) so stays.

The input of a stage is a leaf that the engine keeps for its gradient. The stage computes on an alias of it; the leaf itself
is left without its memory once the forward is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.core.memory.copier import Copier
from megatron.core.memory.saved import Group, Saved, SavedParameter, Storages
from megatron.core.memory.tiers import FarMemory


class Policy(Protocol):
    """What moves."""

    @property
    def whole(self) -> float:
        """The share of a stage's microbatch that an action of the schedule moves; 0 where it is to have no such actions."""
        ...

    def share(self, stage: int, layer: int, layers: int) -> float:
        """Of the movable bytes that a layer saves. `layer`: its place among the layers of its stage."""
        ...

    def takes(self) -> bool:
        """Whether what is saved now may be moved."""
        ...


class ByRatio:
    """So much of every group's bytes."""

    def __init__(self, ratio: float) -> None:
        self.whole = ratio

    def share(self, stage: int, layer: int, layers: int) -> float:
        """See Policy."""
        return self.whole if layer < layers - RESIDENT_LAYERS else 0.0

    def takes(self) -> bool:
        """See Policy."""
        return True


class ActivationOffload:
    """The `Offload` of an engine, and what its program's computations run in.

    bytes_of_stage: what one microbatch of a stage saved last. bytes_out: what has been moved out so far.
    """

    def __init__(
        self,
        policy: Policy,
        copier: Copier,
        far: FarMemory,
        model: nn.Module,
        layers_of_stage: Mapping[int, int],
        device: torch.device,
        parameter_of: Callable[[Tensor], Tensor | None] = lambda tensor: None,
    ) -> None:
        """`layers_of_stage`: how many layers each stage of this rank has. `device`: whose tensors move. `parameter_of`: the
        parameter that a tensor is a part of, if that comes and goes."""
        self.policy, self.far, self.bytes_of_stage, self.bytes_out = policy, far, dict[int, int](), 0
        self.layers_of_stage, self.device = layers_of_stage, device
        self._copier, self._model, self.parameter_of = copier, model, parameter_of
        self._moved: frozenset[tuple[int, int]] = frozenset()
        self._whole: dict[tuple[int, int], Group] = {}  # of forwards whose backward is still to come
        self._left_alone: set[int] = set()  # addresses of storages
        self._now: _Forward | None = None
        self._leaving: list[Group] = []  # since before the last computation: they have had their time
        self._left_lately: list[Group] = []

    def begin_step(self, moved: frozenset[tuple[int, int]], batch: Iterable[Tensor]) -> None:
        """moved: (stage, microbatch) that the schedule's actions move. batch: tensors that live through the step."""
        self._moved = moved
        # Memory of a parameter that comes and goes may be an activation's a moment later.
        staying = (parameter for parameter in self._model.parameters() if self.parameter_of(parameter) is None)
        held = (*staying, *self._model.buffers(), *batch)
        self._left_alone = {tensor.untyped_storage().data_ptr() for tensor in held}

    def end_step(self) -> None:
        """Nothing is under way any more, and all far memory is free."""
        self._begin_computation()
        self._begin_computation()
        self._whole.clear()
        self.far.reclaim()

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Iterator[Tensor | None]:
        """The body is the forward of a stage, on the alias of `received` that it is given."""
        self._begin_computation()
        inside: Tensor | None = None if received is None else _Alias.apply(received)
        whole = (stage, microbatch) in self._moved
        name = f"{microbatch} of stage {stage}"
        self._now = _Forward(name, self, stage, self.layers_of_stage[stage], whole=whole)
        with saved_tensors_hooks(self._pack, _unpack):
            yield inside
        now, self._now = self._now, None
        self.bytes_of_stage[stage] = now.saved
        if whole:
            self._whole[stage, microbatch] = now.group
        else:
            now.end_layer()
            self._left_lately += now.leaving
        if received is not None:
            received.data = received.new_empty(1).expand(received.shape)

    def begin_backward(self) -> None:
        """A backward, or a half of one, is about to run."""
        self._begin_computation()

    def next_layer(self) -> None:
        """A layer is about to run its forward. Called in backward, by a layer that is recomputed, it does nothing."""
        if self._now is not None:
            self._now.next_layer()

    def offload(self, stage: int, microbatch: int) -> None:
        """Start to move a share of what the forward saved; its near memory is given up after the next computation."""
        group = self._whole[stage, microbatch]
        self.start(group, int(self.policy.whole * group.movable))
        self._left_lately.append(group)

    def reload(self, stage: int, microbatch: int) -> None:
        """Start to bring it back; whoever reads it waits for it. What has had its time makes room first."""
        self._give_up()
        self._whole.pop((stage, microbatch)).reload()

    def start(self, group: Group, nbytes: int) -> None:
        """Move so many bytes of a group out."""
        group.start_out(nbytes)
        self.bytes_out += nbytes

    def group(self, name: str, before: Group | None) -> Group:
        """A new one; backward asks for it and so starts the reload of the one before."""
        return Group(name, self._copier, self.far, None if before is None else before.reload)

    def leaves_alone(self, tensor: Tensor) -> bool:
        """Whether what autograd saves must stay as it is."""
        return (
            type(tensor) is not Tensor
            or tensor.device != self.device
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.untyped_storage().nbytes() == 0
            or tensor.untyped_storage().data_ptr() in self._left_alone
        )

    def _pack(self, tensor: Tensor) -> Tensor | Saved | SavedParameter:
        """Autograd keeps this method with every tensor: it must not hold what has been saved."""
        assert self._now is not None
        return self._now.pack(tensor)

    def _begin_computation(self) -> None:
        """What started to leave before the last computation gives up its memory; on the CPU, waits until it may."""
        self._give_up()
        self._leaving, self._left_lately = self._left_lately, []

    def _give_up(self) -> None:
        for group in self._leaving:
            group.finish_out()
        self._leaving = []


class _Forward:
    """A stage's forward under way."""

    def __init__(self, name: str, owner: ActivationOffload, stage: int, layers: int, *, whole: bool) -> None:
        self._stage = stage
        self.group, self.leaving, self.saved = owner.group(name, None), list[Group](), 0
        self._name, self._owner, self._layers, self._whole = name, owner, layers, whole
        self._storages, self._groups = Storages(), [self.group]
        self._layer: int | None = None  # None before the first; what is saved there is moved with it
        self._owed = 0.0  # bytes that should have gone out so far

    def pack(self, tensor: Tensor) -> Tensor | Saved | SavedParameter:
        """What autograd is to keep for a tensor that it saves."""
        if (parameter := self._owner.parameter_of(tensor)) is not None:
            offset = int(tensor.storage_offset()) - int(parameter.storage_offset())
            return SavedParameter(parameter, tensor.shape, tensor.stride(), offset)
        if self._owner.leaves_alone(tensor):
            return tensor
        storage = tensor.untyped_storage()
        near = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        piece, takes = self._storages.find(storage), self._owner.policy.takes()
        if piece is None:
            piece = self.group.add(near, movable=takes)
            self._storages.remember(storage, piece)
            self.saved += piece.nbytes
        else:
            if piece.group is not self.group:
                self.group.take_over(piece, near)
            piece.movable = piece.movable or takes
        return Saved(piece, self.group, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def next_layer(self) -> None:
        """A layer is about to run."""
        if self._layer is None:
            self._layer = 0
        elif not self._whole:
            self.end_layer()
            self._layer += 1
            self.group = self._owner.group(f"{self._name}, layer {self._layer}", self.group)
            self._groups.append(self.group)

    def end_layer(self) -> None:
        """Its share starts to go out; what the layer before it moved has had its time, and gives up its memory."""
        for group in self.leaving:
            group.finish_out()
        movable, share = self.group.movable, self._owner.policy.share(self._stage, self._layer or 0, self._layers)
        self._owed += share * movable
        # Of all layers together exactly the ratio: what one could not give, a later one gives.
        out = sum(group.away for group in self._groups)
        nbytes = max(0, min(int(self._owed) - out, movable)) if share else 0
        self._owner.start(self.group, nbytes)
        self.leaving = [self.group]


class _Alias(torch.autograd.Function):
    """The same memory as another tensor, with the gradient going through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _unpack(kept: Tensor | Saved | SavedParameter) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()
