"""A model with all that trains it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import Parameter
from megatron.core.tensor_parallel.random import RngTracker
from megatron.training.logging.timers import Timers
from megatron.training.result_state import ResultState
from megatron.training.step import TrainStep


@dataclass(kw_only=True)
class TrainedModel:
    """This rank's part of a model, and all that trains it. A checkpoint holds the values of these objects."""

    run: RunConfig
    settings: RunSettings
    groups: Groups
    device: torch.device
    model: GPTModel
    parameters: dict[str, Parameter]
    data_parallel: DataParallel
    optimizer: Optimizer
    rng: RngTracker
    schedule: ParamSchedule
    timers: Timers
    step: TrainStep
    results: ResultState = field(default_factory=ResultState)
