"""The time of the optimizer's update on one rank, on the device, on the CPU or with states in host memory.

Offloaded states pass in chunks. Each chunk is copied in, updated and copied out, in two buffers that take turns, so
that the three overlap for successive chunks: with c chunks the update takes one chunk's three times and c - 1 times the
longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, OffloadSettings
from megatron.config.settings import RunSettings
from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Number
from megatron.spec.optimizer_state import state_bytes
from megatron.spec.sizes import FP32

_MANY = 1 << 20  # elements, to average the bytes of each


@dataclass(frozen=True)
class RankPasses:
    """What a rank's update may hide behind: the forward and the backward of one microbatch in all of its stages."""

    forward: Number
    backward: Number


@dataclass(frozen=True)
class OptimizerUpdate:
    """The update of slices. states: bytes per element on the device; result: of an updated weight.

    waits_for_all: the parameters of all chunks are gathered before the next forward begins. away: part of the weights
    that lives in host memory; weight_buckets: their buckets; reads_weights: the update reads them.
    """

    offload: OffloadSettings
    states: float
    result: int
    waits_for_all: bool
    away: float = 0.0
    weight_buckets: int = 1
    reads_weights: bool = False

    def seconds(self, clock: Clock, elements: float, passes: RankPasses) -> Number:
        """Returns the time that the update of a rank's slice adds to the step. elements: of the slice."""
        if not elements:
            return 0.0
        if self.offload.mode == OFF:
            return self._on_device(clock, elements)
        if self.offload.mode == STATES:
            weights = self.away * self.result

            def update(part: float) -> tuple[Number, ...]:
                back = clock.host_copy((self.states + weights) * part)
                return clock.host_copy((self.states + weights * self.reads_weights) * part), clock.update(part), back

            return self._in_chunks(elements, update)
        on_device = self._on_device(clock, elements * (1 - self.offload.fraction))
        offloaded = elements * self.offload.fraction
        if not self.offload.overlap:
            copied = self.result * (1 - self.away)  # the CPU writes offloaded weights where they are

            def on_cpu(part: float) -> tuple[Number, ...]:
                return clock.host_copy(FP32 * part), clock.cpu_update(part), clock.host_copy(copied * part)

            return np.maximum(on_device, self._in_chunks(offloaded, on_cpu))
        return on_device + self._late(clock, elements, on_device, passes)

    def _on_device(self, clock: Clock, elements: float) -> Number:
        """Weights in host memory are copied to the device bucket by bucket, updated and copied back."""
        if not self.away:
            return clock.update(elements)

        def update(part: float) -> tuple[Number, ...]:
            copy = clock.host_copy(self.result * part)
            return copy * self.reads_weights, clock.update(part), copy

        offloaded = elements * self.away
        return clock.update(elements - offloaded) + _pipelined(
            update(offloaded / self.weight_buckets), self.weight_buckets
        )

    def _late(self, clock: Clock, elements: float, here: Number, passes: RankPasses) -> Number:
        """What an overlapped update delays: the end of backward, by copies of gradients that outlast it, and the next
        forward, by parameters that it reads before they are updated. It reads the offloaded ones last.

        here: time of the device's update, which runs meanwhile.
        """
        fraction = self.offload.fraction
        offloaded = elements * fraction

        copied = self.result * (1 - self.away)

        def cpu(part: float) -> tuple[Number, ...]:
            return clock.cpu_update(part), clock.host_copy(copied * part)

        chunk = self._chunk(offloaded)
        first, all_of_them = self._in_chunks(chunk, cpu), self._in_chunks(offloaded, cpu)
        forward: Number = 0.0 if self.waits_for_all else passes.forward
        waits = np.maximum(
            first - here - forward * (1 - fraction), all_of_them - here - forward * (1 - chunk / elements)
        )
        copies = np.maximum(0.0, clock.host_copy(FP32 * offloaded) - passes.backward)
        return copies + np.maximum(0.0, waits)

    def _chunk(self, elements: float) -> float:
        """Elements of each of the equal chunks that stand for those of the slice."""
        return elements / math.ceil(elements / self.offload.chunk_size)

    def _in_chunks(self, elements: float, times: Callable[[float], Sequence[Number]]) -> Number:
        """times: elements of a chunk -> seconds of each of its steps, which overlap with those of other chunks."""
        chunk = self._chunk(elements)
        return _pipelined(times(chunk), elements / chunk)


def _pipelined(stages: Sequence[Number], count: float) -> Number:
    """Returns the seconds of `count` chunks whose steps take the seconds of `each`."""
    return sum(stages, 0.0) + (count - 1) * functools.reduce(np.maximum, stages)


def optimizer_update(
    optimizer: OptimizerConfig,
    settings: RunSettings,
    *,
    half: bool,
    away: float = 0.0,
    weight_buckets: int = 1,
) -> OptimizerUpdate:
    """Returns the update of a run. half: the model is not fp32. away, weight_buckets: see OptimizerUpdate."""
    offload, shares = settings.optimizer_offload, settings.data_parallel
    gathers = shares.shards in ("optim", "optim_grads")
    return OptimizerUpdate(
        offload=offload,
        states=state_bytes(optimizer, _MANY, half=half, on_cpu=False) / _MANY,
        result=FP32 // 2 if half else FP32,
        waits_for_all=gathers and not shares.overlap_gather,
        away=away,
        weight_buckets=weight_buckets,
        reads_weights=not half or optimizer.main_params_dtype != "fp32",
    )
