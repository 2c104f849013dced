"""Compares what several ranks hold: a flipped bit in one copy would train, and be saved,
as another model without a word.

[Note: copies]
Ranks with other parts of the batch hold the same weights, as do ranks of tp for parameters that are not sharded, and
both ends of the pipeline for tied embeddings. States of the optimizer have copies where its instances do. All of them
compute their copies from the same numbers in the same order, so these agree to the last bit. A rank compares
fingerprints, one number per tensor, so the comparison reads each tensor once and sends 16 bytes for it. What is sharded
(the states under ZeRO, and the weights under ZeRO-3) has no copy: nothing can differ, and nothing shows that it is
wrong. Weights that are gathered after each step are copies of their owner's again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import ReplicaError
from megatron.core.comm.collectives import all_reduce, gather_objects
from megatron.core.groups import Group, Groups
from megatron.core.parameter import ParamInfo, Section
from megatron.core.transformer.moe.router import PREVIOUS_LOAD
from megatron.kernels.ops.fingerprint import fingerprint
from megatron.spec.moe import EXPERT_BIAS
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

_NAMED = 3  # tensors in the message
Key = tuple[str, str, tuple[int, ...], int]  # kind, name of the parameter, offset of the section, first element in it


@dataclass(frozen=True)
class Copy:
    """Elements that the ranks of each group hold as well. The ranks of a group list the same copies in the same
    order."""

    key: Key
    elements: Tensor
    groups: tuple[Group, ...]


class CompareReplicas(Callback):
    """Compares all copies every `interval` steps, and before each save."""

    def __init__(self, interval: int) -> None:
        """interval: 0 never compares."""
        self._interval = interval
        self._compared_at = -1

    def start(self, trainer: Trainer) -> None:
        """Takes the loaded state as compared: it was read from the same files."""
        self._compared_at = trainer.state.iteration

    def is_due(self, trainer: Trainer) -> bool:
        """When the interval is full."""
        return bool(self._interval and trainer.state.iteration % self._interval == 0)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Compares when the interval is full."""
        if self.is_due(trainer):
            self.compare(trainer)

    def compare(self, trainer: Trainer) -> None:
        """Raises ReplicaError on all ranks if two copies differ; see `differing_copies`."""
        iteration = trainer.state.iteration
        if not self._interval or self._compared_at == iteration:
            return
        with trainer.groups.heartbeat.phase("compare-replicas"):
            trainer.data_parallel.synchronize()
            difference = differing_copies(list(copies(trainer)), trainer.groups)
        if difference is not None:
            saves = trainer.run.checkpoint.save is not None
            raise ReplicaError(
                f"after iteration {iteration} copies of the same numbers differ: {difference}. They were equal after "
                f"iteration {self._compared_at}; a processor or its memory may be damaged. This state was not saved; "
                f"{'go on from the newest checkpoint' if saves else 'start again'}, and watch these hosts"
            )
        self._compared_at = iteration


def copies(trainer: Trainer) -> Iterator[Copy]:
    """Yields the weights, states of the optimizer, and buffers of this rank that other ranks hold, too.

    `data_parallel.synchronize` must have been called.
    """
    groups, parameters = trainer.groups, trainer.parameters
    sharded = trainer.data_parallel.sharded_names
    for name, parameter in parameters.items():
        if name not in sharded:
            view = groups.view(parameter.info.spec.axis)
            for section in parameter.info.sections:
                holders = _holders(parameter.info, section, view.copies, groups)
                yield Copy(("weight", name, section.offset, 0), section.of(parameter.detach()), holders)
    weights = ((piece, "weight", data) for piece, data in trainer.data_parallel.weights() if piece.name in sharded)
    for pieces in (weights, trainer.optimizer.stored()):
        for piece, kind, elements in pieces:
            info = parameters[piece.name].info
            section, view = info.section_at(piece.start), groups.view(info.spec.axis)
            holders = _holders(info, section, view.replicas, groups)
            yield Copy((kind, piece.name, section.offset, piece.start - section.start), elements, holders)
    for name, buffer in trainer.model.named_buffers():
        if name.endswith((f".{EXPERT_BIAS}", f".{PREVIOUS_LOAD}")):
            yield Copy(("buffer", name, (), 0), buffer, (groups.dp_cp, groups.tp))
    yield Copy(("loss scale", "", (), 0), trainer.optimizer.loss_scale.value, (groups.world,))


def _holders(info: ParamInfo, section: Section, data: Group, groups: Groups) -> tuple[Group, ...]:
    along = groups.along(info.spec.axis)
    layer = () if section.holders == 1 else (along if section.holders == along.size else groups.tp_inner,)
    return (data, *layer, *((groups.ends,) if info.on_both_ends else ()))


def differing_copies(listed: list[Copy], groups: Groups) -> str | None:
    """Returns which copies differ and which ranks hold which of them, None if all are equal. The same on all ranks.

    The host waits for the device. Communication: for each group with copies an all-reduce of two numbers per copy, and
    one of a number over the world; if something differs, two gathers of a few objects over the world.
    """
    device = listed[-1].elements.device
    prints = torch.stack([fingerprint(copy.elements).to(device) for copy in listed])
    differs = torch.zeros(len(listed), dtype=torch.bool, device=device)
    by_group: dict[tuple[str, tuple[int, ...]], tuple[Group, list[int]]] = {}
    for index, copy in enumerate(listed):
        for group in copy.groups:
            if group.size > 1:
                by_group.setdefault((group.name, group.ranks), (group, []))[1].append(index)
    for _, (group, indices) in sorted(by_group.items()):  # along one axis after the other: no ranks wait in a circle
        mine = prints[indices]
        largest, smallest = all_reduce(torch.stack([mine, ~mine]), group, "max")
        differs[indices] |= largest != ~smallest
    if not all_reduce(differs.any().to(torch.int64).view(1), groups.world, "max").item():
        return None
    keys = {listed[index].key for index in differs.nonzero().flatten().tolist()}
    everywhere: set[Key] = set().union(*gather_objects(keys, groups.world))
    named = sorted(everywhere, key=lambda key: (key[0] != "weight", key))[:_NAMED]
    values = dict(zip((copy.key for copy in listed), prints.tolist(), strict=True))
    held = gather_objects(({key: values[key] for key in named if key in values}, socket.gethostname()), groups.world)
    sentences = [_described(key, [(values.get(key), host) for values, host in held]) for key in named]
    unnamed = len(everywhere) - len(named)
    return "; ".join(sentences) + (f"; and {unnamed} more" if unnamed else "")


def _described(key: Key, held: list[tuple[int | None, str]]) -> str:
    """Returns who holds what of one tensor; those that hold the rarest value are named with their hosts."""
    kind, name, offset, _ = key
    ranks: dict[int, list[int]] = {}
    for rank, (value, _) in enumerate(held):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    *most, fewest = sorted(ranks.values(), key=len, reverse=True)
    hosts = ", ".join(sorted({held[rank][1] for rank in fewest}))
    what = {"weight": name, "buffer": name, "loss scale": kind}.get(kind, f"{kind} of {name}")
    place = f" from {list(offset)}" if any(offset) else ""
    majority = " and ".join(f"{_list(group)} hold{'s' if len(group) == 1 else ''} another" for group in most)
    return f"{what}{place}: {_list(fewest)} ({hosts}) hold{'s' if len(fewest) == 1 else ''} one value, {majority}"


def _list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
