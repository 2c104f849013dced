"""The copies of activations to host memory and back: their bytes, and the time for which computation waits for them.

The schedule copies whole microbatches of a stage, each during one computation, by the rules of `schedule/events.py`. A
microbatch whose backward follows too soon for that, and every one with --cpu-offloading and
--fine-grained-activation-offloading, is copied layer by layer: out during the forward of the next layer, back during
the backward of the layer after it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.activation_offload import StageTimes, largest_hidden_ratio
from megatron.planner.memory.parts import DecoderProfiles
from megatron.planner.memory.sizes import sizes_of
from megatron.planner.memory.stage import SavedActivations, saved_activations
from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Number
from megatron.planner.time.play import PlayShape
from megatron.planner.time.stage_time import OFFLOAD, Parts, Phases
from megatron.schedule.offload_pass import moved_groups, with_offload
from megatron.schedule.schedule import Schedule
from megatron.spec.decoder import DecoderSpec
from megatron.spec.sizes import Target


@dataclass(frozen=True)
class ActivationCopies:
    """What one microbatch moves. Lists have one entry per stage.

    saved: bytes that a forward leaves for its backward. by_layer: bytes of each layer that move layer by layer. ratio:
    the fraction of `saved` that the schedule's copies move. is_auto: a run will choose it. split: backward is split
    into two halves.
    """

    saved: tuple[int, ...]
    by_layer: tuple[tuple[int, ...], ...]
    ratio: float
    is_auto: bool
    split: bool

    def scheduled(self, clock: Clock) -> list[Number]:
        """Returns the time of the schedule's copy of a microbatch in each stage, in one direction."""
        return [clock.host_copy(self.ratio * nbytes) for nbytes in self.saved]

    def waits(self, clock: Clock, phases: Phases, stage: int, layers: Sequence[Phases], share: float) -> Phases:
        """Adds the time for which computation waits for copies layer by layer, without which `phases` is a microbatch.

        layers: of the stage, in order. share: of the microbatches that move layer by layer.
        """
        forward, input_grad = Parts(phases.forward), Parts(phases.input_grad)
        for place, nbytes in enumerate(self.by_layer[stage]):
            if nbytes and share:
                after = layers[place + 1]  # the last layer of a stage stays on the device
                backward = after.input_grad.total if self.split else after.input_grad.total + after.weight_grad.total
                copy = clock.host_copy(nbytes)
                forward.add(OFFLOAD, share * np.maximum(0.0, copy - after.forward.total))
                input_grad.add(OFFLOAD, share * np.maximum(0.0, copy - backward))
        return Phases(forward, input_grad, phases.weight_grad)

    def hidden_ratio(self, clock: Clock, schedule: Schedule, stages: Sequence[Phases], layers: Sequence[int]) -> float:
        """Returns the ratio that --pipeline-offload-ratio auto will choose: the largest whose copies cost no time.

        schedule: with its transfers. stages: a microbatch in each, without copies; layers: of each, their number.
        """
        times = [
            StageTimes(
                forward=float(np.mean(phases.forward.total)),
                backward=float(np.mean(phases.input_grad.total + phases.weight_grad.total)),
                input_grad=float(np.mean(phases.input_grad.total)) if self.split else 0.0,
                nbytes=nbytes,
                layers=count,
            )
            for phases, nbytes, count in zip(stages, self.saved, layers, strict=True)
        ]
        rate = float(np.mean(max(self.saved) / clock.host_copy(max(self.saved))))
        return largest_hidden_ratio(schedule, times, rate, rate)


def activation_copies(run: RunConfig, settings: RunSettings, spec: DecoderSpec) -> ActivationCopies | None:
    """Returns what a run's activation offload copies, None without it. With the ratio auto nothing is copied yet."""
    offload, stages = run.activation_offload, settings.pipeline.stages
    if offload.kind is None:
        return None
    seq_length, micro_batch_size = run.data.seq_length, run.train.micro_batch_size
    assert seq_length and micro_batch_size
    sizes = sizes_of(
        run.model,
        settings,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        loss_chunk=run.train.cross_entropy_chunk_size,
        mlp_chunk=run.recompute.mlp_chunk_size,
        documents=run.data.separate_documents,
        target=Target(cpu=False),
        moe=run.moe,
        fp8=run.fp8,
    )
    profiles = DecoderProfiles(spec, sizes, run.recompute, offload)
    memories: dict[object, SavedActivations] = {}  # of stages that are alike
    copies = []
    for stage in stages:
        key = stage.embedding, stage.head, tuple(id(spec.layers[number]) for number in stage.layers)
        if key not in memories:
            memories[key] = saved_activations(stage, run.recompute, offload, profiles)
        copies.append(memories[key])
    return ActivationCopies(
        tuple(saved.nbytes for saved in copies),
        tuple(saved.by_layer for saved in copies),
        (offload.ratio or 0.0) if offload.kind == "ratio" else 0.0,
        offload.kind == "ratio" and offload.ratio is None,
        settings.pipeline.schedule.splits_backward,
    )


def copies_of_layers(settings: RunSettings, offloaded: Mapping[int, int]) -> ActivationCopies:
    """Returns the copies where single layers are offloaded. offloaded: layer -> bytes."""
    stages = settings.pipeline.stages
    by_layer = tuple(tuple(offloaded.get(number, 0) for number in stage.layers) for stage in stages)
    split = settings.pipeline.schedule.splits_backward
    return ActivationCopies(tuple(map(sum, by_layer)), by_layer, 0.0, is_auto=False, split=split)


@functools.lru_cache(maxsize=1024)
def scheduled_copies(shape: PlayShape, m: int) -> Counter[int]:
    """Returns stage -> number of its m microbatches that the schedule's own actions copy."""
    schedule = with_offload(shape.computations(m))
    return Counter(stage for actions in schedule.actions for stage, _ in moved_groups(actions))
