"""CUDA graphs of a run's layers, built from its flags and captured at the beginning of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron.config.train import TrainConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.streams.graph import GraphPool
from megatron.core.transformer.layer_graphs import LayerGraphs
from megatron.schedule.schedule import Schedule
from megatron.schedule.validate import most_under_way
from megatron.training.microbatches import Microbatches


class StepGraphs:
    """The graphs of this rank's layers, with as many slots as the schedule of a step has microbatches under way."""

    def __init__(self, graphs: LayerGraphs, layers_of_stage: Mapping[int, range], rank: int) -> None:
        """layers_of_stage: of the stages of this rank, by their number. rank: in the pipeline."""
        self._graphs, self._layers_of_stage, self._rank = graphs, layers_of_stage, rank

    def begin_step(self, schedule: Schedule, microbatches: Microbatches) -> None:
        """Captures the graphs that the schedule needs and that are missing. Waits for the device when it captures."""
        slots = most_under_way(schedule.actions[self._rank])
        self._graphs.begin_step({self._layers_of_stage[stage]: count for stage, count in slots.items()})

    def end_step(self) -> None:
        """Does nothing: a slot is free again as soon as its backward has run."""


def uses_graphs(train: TrainConfig, device: torch.device) -> bool:
    """Returns whether the layers run by CUDA graphs."""
    return train.cuda_graph_impl == "local" and not train.skip_train and device.type == "cuda"


def build_graphs(
    train: TrainConfig, model: GPTModel, data_parallel: DataParallel, rank: int, make_pool: Callable[[], GraphPool]
) -> StepGraphs:
    """Returns the graphs by which the model's layers run from now on, once steps of warm-up have passed.

    rank: in the pipeline.
    """
    layers = {int(number): layer for number, layer in model.decoder.layers.items()}
    graphs = LayerGraphs(layers, data_parallel, make_pool, warmup_steps=train.cuda_graph_warmup_steps)
    model.decoder.graphs = graphs
    return StepGraphs(graphs, {number: stage.layers for number, stage in model.stages.items()}, rank)
