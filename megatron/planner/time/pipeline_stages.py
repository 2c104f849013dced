"""The stages of a pipeline: a microbatch in each of them, and the costs of the pipeline's schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.config.pipeline import PipelineSettings
from megatron.config.recompute import LayerChoices, RecomputeConfig
from megatron.planner.time.constants import Number
from megatron.planner.time.play import PlayShape
from megatron.planner.time.stage_time import NOTHING, Phases
from megatron.schedule.costs import Costs
from megatron.schedule.partition import Stage

_Array = NDArray[np.float64]
LayerKey = tuple[int, bool]  # a kind of layer, and whether backward repeats all of its forward


@dataclass(frozen=True)
class PipelineStages:
    """The stages of a pipeline by kind.

    examples: a stage of each kind. kind_of: [stages], the kind of each stage. layer_kinds: the kind of each layer of
    the model, those of predictions behind the others.
    """

    settings: PipelineSettings
    examples: tuple[Stage, ...]
    kind_of: NDArray[np.int64]
    layer_kinds: tuple[int, ...]

    @classmethod
    def separate(cls, settings: PipelineSettings, layer_kinds: tuple[int, ...]) -> PipelineStages:
        """Returns the stages with a kind for each, because what they copy or send may differ."""
        return cls(settings, settings.stages, np.arange(len(settings.stages)), layer_kinds)

    @classmethod
    def alike(cls, settings: PipelineSettings, layer_kinds: tuple[int, ...]) -> PipelineStages:
        """Returns the stages with one kind for those with the same layers and ends."""
        kinds: dict[tuple[object, ...], int] = {}
        examples, kind_of = [], []
        for stage in settings.stages:
            key = (tuple(layer_kinds[number] for number in stage.layers), stage.embedding, stage.head)
            if key not in kinds:
                kinds[key] = len(kinds)
                examples.append(stage)
            kind_of.append(kinds[key])
        return cls(settings, tuple(examples), np.array(kind_of), layer_kinds)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of stages of each rank, of alike ranks once."""
        placement, kinds = self.settings.placement, self.kind_of.tolist()
        ranks = [tuple(kinds[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
        return tuple(dict.fromkeys(ranks))

    def layers(self, stage: Stage, recompute: RecomputeConfig | LayerChoices) -> list[LayerKey]:
        """Returns the key of each layer of a stage, in order; behind them those of the predictions, each recomputed on
        its own."""
        kinds, groups = self.layer_kinds, recompute.groups(stage.layers)
        if stage.head:
            for number in range(stage.layers.stop, len(kinds)):
                groups = groups + recompute.groups((number,))
        return [(kinds[number], full) for group, full in groups for number in group]

    def phases(
        self,
        recompute: RecomputeConfig | LayerChoices,
        layer: Callable[[int, bool], Phases],
        embedding: Phases,
        head: Phases,
    ) -> list[Phases]:
        """Returns the time of a microbatch in each kind of stage. layer: from a `LayerKey` to the time of the layer."""
        stages = []
        for stage in self.examples:
            phases = NOTHING
            for key, count in Counter(self.layers(stage, recompute)).items():
                phases = phases.plus(layer(*key), count)
            if stage.embedding:
                phases = phases.plus(embedding)
            if stage.head:
                phases = phases.plus(head)
            stages.append(phases)
        return stages

    def shape(self, buckets: int, *, offload: bool = False) -> PlayShape:
        """Returns the schedule. buckets: reductions of gradients per stage; offload: it copies activations."""
        settings, p = self.settings, self.settings.placement.num_ranks
        return PlayShape(
            settings.schedule,
            p,
            settings.placement.num_stages // p,
            settings.group,
            overlap=settings.overlap,
            blocking=not settings.overlap,
            buckets=buckets,
            offload=offload,
            pairs=settings.pairs,
        )

    def costs(
        self,
        seconds: _Array,
        transfer: _Array,
        latency: _Array,
        bucket: _Array,
        copied: _Array,
        exchanged: _Array | None = None,
    ) -> Costs:
        """Returns the costs of the schedule for K cases.

        seconds: [3, kinds of stages, K], see `totals`. transfer, latency: [stages - 1, K]. bucket: [kinds of stages,
        K], of one reduction. copied: [kinds of stages, K], of the copy of a microbatch in one direction. exchanged: [2,
        kinds of stages, K], of the exchanges of tokens in forward and backward, where they are not part of `seconds`.
        """
        forward, input_grad, weight_grad = seconds[:, self.kind_of]
        copies = copied[self.kind_of]
        exchanges = np.zeros((2, *forward.shape)) if exchanged is None else exchanged[:, self.kind_of]
        return Costs(
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            backward=input_grad + weight_grad,
            transfer=transfer,
            latency=latency,
            offload=copies,
            reload=copies,
            bucket=bucket[self.kind_of],
            forward_exchange=exchanges[0],
            backward_exchange=exchanges[1],
        )


def totals(stages: Sequence[Phases], size: int) -> _Array:
    """Returns [3, stages, K] seconds of a microbatch: forward, input gradient and weight gradient. size: K."""
    return np.stack(
        [
            columns([phases.forward.total for phases in stages], size),
            columns([phases.input_grad.total for phases in stages], size),
            columns([phases.weight_grad.total for phases in stages], size),
        ]
    )


def columns(values: Sequence[Number], size: int) -> _Array:
    """Returns [n, K] from n numbers or arrays of K. size: K."""
    return np.array([np.broadcast_to(value, (size,)) for value in values]).reshape(len(values), size)
