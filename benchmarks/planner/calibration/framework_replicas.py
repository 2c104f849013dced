"""The time of sums and gathers of another framework's replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from benchmarks.planner.calibration.framework import Framework
from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Number
from megatron.planner.time.replicas import Held, Replicas
from megatron.planner.time.stage_time import MEMORY, Parts, Phases
from megatron.spec.collectives import ALL_REDUCE

# Bytes per parameter that are read and written around a collective that has buffers of its own.
_COPIED_GATHER, _COPIED_REDUCE = 4, 6
# The same for a sum of whole gradients in half precision: into one tensor, division, to fp32, back, out of the tensor.
_COPIED_SUM = 24


@dataclass(frozen=True)
class FrameworkReplicas(Replicas):
    """The replicas of a run in another framework."""

    framework: Framework = field(kw_only=True)

    def with_microbatch(self, clock: Clock, phases: Phases, stage: int) -> Phases:
        """Adds the communication of every microbatch, and its copies. Those of a forward hide its gathers, too."""
        communicated = super().with_microbatch(clock, phases, stage)
        if communicated is phases or not self.framework.copies_sharded:
            return communicated
        moved, gathers = clock.traffic(self.held[stage].all), self.settings.shards == "optim_grads_params"
        forward = Parts(phases.forward)
        if gathers:
            forward.add(MEMORY, _COPIED_GATHER * moved)
        copied = super().with_microbatch(clock, dataclasses.replace(phases, forward=forward), stage)
        input_grad = Parts(copied.input_grad)
        if gathers:
            input_grad.add(MEMORY, _COPIED_GATHER * moved)
        input_grad.add(MEMORY, _COPIED_REDUCE * moved)
        return dataclasses.replace(copied, input_grad=input_grad)

    def reduce(self, clock: Clock, held: Held) -> Number:
        """Returns the time of the sums of these parameters' gradients.

        A framework that sums whole gradients issues an all-reduce between the ranks that share the optimizer, and one
        over the others.
        """
        if not self.framework.whole_sums:
            return super().reduce(clock, held)
        seconds: Number = clock.traffic(_COPIED_SUM * held.all)
        for view, numel in held.by_view.items():
            for kind in ("shard", "replicas"):
                place = self.places[f"{view}_{kind}"]
                seconds = seconds + clock.bucket(place, ALL_REDUCE, self.gradient_bytes * numel)
        return seconds
