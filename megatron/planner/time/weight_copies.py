"""The copies of weights that live in host memory (--cpu-offloading-weights), and the time for which computation waits.

Weights lie in buckets. A bucket is copied to the device, and gathered where ranks share it, during the use of the one
before, in forward and in backward. The first bucket of a forward stays from the microbatch before if the rank has one
stage, and the first one of a backward is the forward's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.base.mesh import DENSE
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.constants import Number
from megatron.planner.time.replicas import Held, Replicas, held_by
from megatron.planner.time.stage_time import INTERFERENCE, OFFLOAD, Parts, Phases
from megatron.schedule.partition import Stage
from megatron.spec.collectives import ALL_GATHER
from megatron.spec.decoder import DecoderSpec


@dataclass(frozen=True)
class WeightCopies:
    """Weights in host memory. held, buckets: of each stage, its offloaded parameters and their buckets.

    layers: of a stage, its first ones, whose weights these are. width: bytes per parameter. stays: the first bucket
    stays for the next microbatch. gathers: a gather follows each copy that is not one of fully sharded parameters.
    """

    held: tuple[Held, ...]
    buckets: tuple[int, ...]
    layers: int
    width: int
    stays: bool
    gathers: bool

    def waits(self, clock: Clock, places: Places, phases: Phases, stage: int, layers: Sequence[Phases]) -> Phases:
        """Adds the time for which computation waits for weights. layers: of the stage, in order."""
        forward, input_grad = Parts(phases.forward), Parts(phases.input_grad)
        count, held = self.buckets[stage], self.held[stage]
        copy = clock.host_copy(self.width * held.sliced(places) / count)
        gather: Number = 0.0
        if self.gathers:
            for view, numel in held.by_view.items():
                nbytes = self.width * numel / count
                gather = gather + clock.bucket(places[f"{view}_shard"], ALL_GATHER, nbytes)
        users = layers[: self.layers]
        passes = (
            (forward, sum((layer.forward.total for layer in users), 0.0), 0 if self.stays else 1),
            (input_grad, sum((layer.input_grad.total + layer.weight_grad.total for layer in users), 0.0), 0),
        )
        for parts, seconds, first in passes:
            exposed = np.maximum(0.0, copy + gather - seconds / count)
            parts.add(OFFLOAD, (count - 1) * exposed + first * (copy + gather))
            hidden = np.minimum(gather, copy + gather - exposed)
            slowing = clock.bucket_slowing(hidden, places[f"{DENSE}_shard"], ALL_GATHER)
            parts.add(INTERFERENCE, (count - 1) * slowing)
        return Phases(forward, input_grad, phases.weight_grad)

    def share(self, whole: Sequence[Held]) -> float:
        """Returns the part of all parameters that lives in host memory. whole: of each stage."""
        return sum(held.all for held in self.held) / sum(held.all for held in whole)


def weight_copies(
    run: RunConfig, settings: RunSettings, spec: DecoderSpec, replicas: Replicas, width: int
) -> WeightCopies | None:
    """Returns what a run's weight offload copies; None without it. width: bytes per parameter."""
    count = run.activation_offload.offloaded_weight_layers
    if not count:
        return None
    held = []
    for stage in settings.pipeline.stages:
        layers = stage.layers[:count]
        held.append(held_by(spec, settings.mesh, Stage(stage.number, layers, embedding=False, head=False)))
    mesh, shards = settings.mesh, settings.data_parallel.shards
    return WeightCopies(
        tuple(held),
        tuple(max(1, stage.all // replicas.bucket_size) for stage in held),
        count,
        width,
        stays=len(settings.pipeline.stages) == mesh.pp,
        gathers=shards in ("optim", "optim_grads"),
    )
