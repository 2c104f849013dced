"""Weights in far memory: which of a run's parameters live there."""

from __future__ import annotations

import torch

from megatron.config.run import RunConfig
from megatron.core.memory.far_weights import FarWeights
from megatron.core.models.gpt import GPTModel
from megatron.core.timeline import Timeline
from megatron.training.activation_offload import copying


def build_far_weights(run: RunConfig, model: GPTModel, device: torch.device, timeline: Timeline) -> FarWeights | None:
    """Homes of the first --cpu-offloading-num-layers layers of each stage; None without --cpu-offloading-weights.

    Memory and ways of its own: those of activations are reclaimed every step. Raises ConfigError for --offload-dir on CUDA.
    """
    count = run.activation_offload.far_weight_layers
    if not count:
        return None
    layers = [layer for stage in model.stages.values() for layer in stage.layers[:count]]
    names = [
        f"decoder.layers.{layer}.{name}"
        for layer in layers
        for name, _ in model.decoder.layers[str(layer)].named_parameters()
    ]
    return FarWeights(names, *copying(run, device, timeline))
