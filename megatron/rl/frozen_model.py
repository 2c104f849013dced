"""Models that are read from a Hugging Face folder and never trained: a teacher, and a model that rewards answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules import layout, moe
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.source import SCORE, HFSource
from megatron.core.models.score import ScoreModel
from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.batch import Batch
from megatron.training.initial_weights import load_weights
from megatron.training.setup import connect_model
from megatron.training.step import log_probabilities
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel


class FrozenModel:
    """A model of its own shape under the layout of the trained one, whose layers the pipeline ranks share evenly.

    Its weights are in host memory, and on the device while it computes.
    """

    def __init__(
        self, flag: str, folder: str, trained: TrainedModel, *, temperature: float, has_score: bool = False
    ) -> None:
        """flag: the one that names the folder. temperature: divides all logits. has_score: the folder has a score in
        place of the head. Collective over the world. Raises ConfigError and CheckpointError."""
        run, device, world = trained.run, trained.device, trained.groups.world
        source = together(world, lambda: HFSource(Path(folder), has_score=has_score))
        self.config = _in_precision_of(source.model, run.model)
        frozen = dataclasses.replace(run, model=self.config, parallel=_shared_evenly(run.parallel))
        together(world, lambda: _check(flag, folder, frozen, world.size))
        settings = resolve(frozen, trained.groups.mesh)
        self._groups = groups = connect_model(frozen, settings, trained.groups, device)
        self._pipeline = settings.pipeline
        build = Build(
            self.config,
            groups,
            settings.sequence_parallel,
            choose_kernels(self.config, device, blocks=groups.cp.size > 1, etp=groups.etp.size),
            RngTracker(run.train.seed, groups, device),
            device,
            cp_comm_types=settings.attention_comm_types,
            moe=run.moe,
            loss_chunk=run.train.cross_entropy_chunk_size,
            temperature=temperature,
        )
        stages = settings.pipeline.stages_of(groups.pp.rank)
        model = ScoreModel(build, stages, source.folder.view(SCORE)) if has_score else GPTModel(build, stages)
        # Parameters are not marked as frozen: torch multiplies by such ones in another order of sums than the trained
        # model does, and a teacher that is the policy would differ from it in the last bits.
        self._model = model.eval()
        load_weights(folder, source, local_parameters(self._model), groups, dict(self._model.named_buffers()))
        self._device = device
        self._to(torch.device("cpu"))

    def log_probabilities(self, batches: Sequence[Batch]) -> Tensor:
        """Returns the log-probabilities of all labels, fp32 [rows, s]; of a model with a score, the scores of the
        sequences up to each token.

        batches: microbatches of this replica. Communication: that of `log_probabilities` of training/step.py.
        """
        with self._groups.heartbeat.phase("frozen-model"), self._on_device():
            return torch.cat(log_probabilities(self._model, batches, self._groups, self._pipeline))

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        host = {name: parameter.data for name, parameter in self._model.named_parameters()}
        self._to(self._device)
        yield
        for name, parameter in self._model.named_parameters():
            parameter.data = host[name]

    def _to(self, device: torch.device) -> None:
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(device)


def _in_precision_of(model: ModelConfig, trained: ModelConfig) -> ModelConfig:
    """Returns the model with the precision and the kernels of the trained one, and without adapters or predictions."""
    names = [name for name in RUNTIME_FIELDS if not name.startswith("lora_")]
    return dataclasses.replace(model, mtp_num_layers=0, **{name: getattr(trained, name) for name in names})


def _shared_evenly(parallel: ParallelConfig) -> ParallelConfig:
    """Returns the layout without the flags that say which layers of the trained model a pipeline rank has."""
    return dataclasses.replace(
        parallel,
        pipeline_model_parallel_layout=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )


def _check(flag: str, folder: str, run: RunConfig, world_size: int) -> None:
    """Raises ConfigError unless the model fits the layout of the run."""
    rules = [*layout.rules(run, world_size), *moe.rules(run, world_size)]
    problems = [problem for rule in rules if (problem := rule()) is not None]
    if problems:
        raise ConfigError(*(f"{flag} {folder}: {problem}" for problem in problems))
