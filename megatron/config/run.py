"""The whole configuration of a run. Components get only their own part of it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import Field, dataclass, field
from typing import Any

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.data_parallel import DataParallelSettings, data_parallel_settings
from megatron.config.features.feature import Note
from megatron.config.flag import flag_of, spelling
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.moe_training import MoEConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import PipelineSettings, pipeline_settings
from megatron.config.recompute import RecomputeConfig
from megatron.config.rl import RLConfig
from megatron.config.train import DryRunConfig, EvalConfig, LoggingConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All parts of a run's configuration, and the names of the fields that the user gave explicitly."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    optimizer_offload: OptimizerOffloadConfig = field(default_factory=OptimizerOffloadConfig)
    activation_offload: ActivationOffloadConfig = field(default_factory=ActivationOffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    given: frozenset[str] = frozenset()  # names of fields that were set on the command line
    notes: tuple[Note, ...] = ()  # typed flags that change no result
    already: tuple[str, ...] = ()  # typed flags that ask for the behaviour of every run

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON-ready dictionary: part name -> field name -> value."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in PARTS}

    def pipeline_settings(self) -> PipelineSettings:
        """Schedule and stages. Raises ConfigError for flags that contradict each other or do not fit the layers."""
        assert self.model.num_layers
        return pipeline_settings(self.parallel, self.model.num_layers)

    def data_parallel_settings(self) -> DataParallelSettings:
        """What data-parallel ranks share, and when they reduce gradients."""
        return data_parallel_settings(self.parallel, self.optimizer.main_grads_dtype)

    def value(self, name: str) -> Any:
        """Returns the value of the flag field `name` of any part."""
        part, spec = flag_fields()[name]
        return getattr(getattr(self, part), spec.name)


PARTS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "moe": MoEConfig,
    "fp8": Fp8Config,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "optimizer_offload": OptimizerOffloadConfig,
    "activation_offload": ActivationOffloadConfig,
    "recompute": RecomputeConfig,
    "schedule": ScheduleConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "train": TrainConfig,
    "rl": RLConfig,
    "eval": EvalConfig,
    "logging": LoggingConfig,
    "checkpoint": CheckpointConfig,
    "dry_run": DryRunConfig,
}


def with_batch_of_answers(run: RunConfig) -> RunConfig:
    """Returns the run whose step, if nothing else is typed, trains on all answers that are sampled before an update of
    the policy. A run that learns from preferences samples none."""
    samples = run.data.perform_rl_step and run.rl.preference_data is None
    if not samples or run.train.global_batch_size is not None:
        return run
    train = dataclasses.replace(run.train, global_batch_size=run.rl.answers_per_rollout)
    return dataclasses.replace(run, train=train)


@functools.cache
def flag_fields() -> dict[str, tuple[str, Field[Any]]]:
    """Returns every flag of a run: field name -> (its part, field), in the order of the classes. Names are unique."""
    return {
        spec.name: (part, spec)
        for part, cls in PARTS.items()
        for spec in dataclasses.fields(cls)
        if flag_of(spec) is not None
    }


def flag_name(field_name: str) -> str:
    """Returns the flag of this field as the user types it, for messages."""
    return spelling(flag_fields()[field_name][1])
