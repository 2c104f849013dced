"""Lets the ranks of another replica compute the microbatches of a step, to compare two machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.base.mesh import Mesh
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.training.batch import Batch


@dataclasses.dataclass(frozen=True)
class ReplicaInput:
    """The input of the forward and backward of a replica, besides the weights: its microbatches, and this rank's
    random state of dropout, by stream."""

    batches: Sequence[Batch]
    random: dict[str, Tensor]


def replica_distance(mesh: Mesh, *, experts: bool) -> int | None:
    """Returns how far away along dp the next replica is that computes on other ranks alone; None if there is none.

    Ranks that exchange tokens of experts compute together.
    """
    joined, rows = mesh.etp * mesh.ep if experts else 1, mesh.tp * mesh.cp
    distance = max(1, joined // rows)
    if max(joined, rows) % min(joined, rows) or mesh.dp % distance or mesh.dp == distance:
        return None
    return distance


def rank_at(mesh: Mesh, rank: int, distance: int) -> int:
    """Returns the rank at the same place of the replica that is `distance` further along dp."""
    dp = mesh.coordinates(rank)["dp"]
    return rank + ((dp + distance) % mesh.dp - dp) * mesh.tp * mesh.cp


def input_of_replica(mine: ReplicaInput, distance: int, groups: Groups, device: torch.device) -> ReplicaInput:
    """Returns the input of the rank `distance` further along dp. Communication: one gather of the inputs over dp.

    The host waits for the device. It is for steps that something is wrong with.
    """
    sent = dataclasses.replace(mine, batches=[_on(batch, torch.device("cpu")) for batch in mine.batches])
    received = gather_objects(sent, groups.dp)[(groups.dp.rank + distance) % groups.dp.size]
    return dataclasses.replace(received, batches=[_on(batch, device) for batch in received.batches])


def _on(batch: Batch, device: torch.device) -> Batch:
    moved: dict[str, Any] = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    segments, experts = batch.segments, batch.experts
    if segments is not None:
        starts = None if segments.starts is None else segments.starts.to(device)
        segments = dataclasses.replace(segments, ids=segments.ids.to(device), starts=starts)
    if experts is not None:
        experts = {number: choices.to(device) for number, choices in experts.items()}
    return dataclasses.replace(batch, **moved, segments=segments, experts=experts)
