"""Builds a run that learns from rewards, or from preferences: everything of a training run, with a sampler, or pairs of
answers, in place of its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from megatron.config.rl import RLConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.sample import Splits
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.groups import Groups
from megatron.core.models.hf.side_files import stop_ids
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.planner.memory.sampling import sampling_shape
from megatron.rl.callbacks import EvaluateAnswers, EvaluatePairs, LogReports, LogRollouts
from megatron.rl.environments import EnvironmentSource, environment_source
from megatron.rl.episodes import TurnEncoder
from megatron.rl.external_sampler import ExternalSampler
from megatron.rl.function_workers import FunctionPool
from megatron.rl.learner import RolloutReader
from megatron.rl.policy import Policy
from megatron.rl.preference_data import PreferenceOptions, PreferencePair, load_preferences
from megatron.rl.preference_reader import PreferenceReader
from megatron.rl.prompts import Prompt, PromptOptions, PromptSet, load_prompts
from megatron.rl.reference import ReferenceWeights
from megatron.rl.reference_file import add_reference
from megatron.rl.reward_model import RewardModel
from megatron.rl.reward_workers import RewardPool
from megatron.rl.rewards import RewardSource, built_in_source, file_source
from megatron.rl.rollout import AnswerSource, Rollouts
from megatron.rl.sampler import Sampler
from megatron.rl.teacher import open_teacher
from megatron.training import main as training
from megatron.training.logging.writers import Metrics
from megatron.training.loop import Callback
from megatron.training.setup import assemble, read_files
from megatron.training.together import together
from megatron.training.trainer import Trainer

_Pool = TypeVar("_Pool", bound=FunctionPool)


def main(run: RunConfig) -> None:
    """Builds and trains the run of a command line; see training/main.py."""
    training.main(run, build, callbacks)


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Builds the trainer, and the reader that samples its batches or reads pairs. Collective over the world. Raises
    UserError."""
    run, checkpoint, tokenizer = read_files(run, groups)
    streams = Streams(device, Timeline(device))
    if run.rl.preference_data is not None:

        def read_pairs(files: Sequence[str]) -> PromptSet[PreferencePair]:
            options = preference_options(run, files)
            return together(groups.world, lambda: load_preferences(options, tokenizer, run.train.seed))

        pairs, files = read_pairs(run.rl.preference_data), run.rl.eval_preference_data
        held_out = None if files is None else read_pairs(files)
        trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))
        reference = None
        if run.rl.precompute_ref_log_probs is None:
            reference = ReferenceWeights(trainer, is_anew=trainer.state.iteration == 0)
        else:
            every_pair = [*pairs.in_file_order, *(held_out.in_file_order if held_out else ())]
            add_reference(trainer, every_pair, Path(run.rl.precompute_ref_log_probs))
        trainer.readers = Splits(PreferenceReader(trainer, pairs, reference, held_out), None, None)
        return trainer
    return build_with_sampler(run, checkpoint, tokenizer, groups, streams)


def build_with_sampler(
    run: RunConfig, checkpoint: Path | None, tokenizer: Tokenizer, groups: Groups, streams: Streams
) -> Trainer:
    """Builds the trainer, and the reader that samples its batches, of a run whose files have been read. Collective over
    the world. Raises UserError."""
    config = run.rl
    source, seed = reward_source(config), run.train.seed
    turns = None if config.custom_environment_path is None else environment_source(config.custom_environment_path)

    def read_prompts(files: tuple[str, ...] | None) -> PromptSet[Prompt] | None:
        if files is None:
            return None
        return together(groups.world, lambda: load_prompts(prompt_options(run, files, source), tokenizer, seed))

    prompts, held_out = read_prompts(config.prompt_data), read_prompts(config.eval_prompt_data)
    assert prompts is not None and config.rollout_max_response_len
    trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))
    groups = trainer.groups
    sampler = answer_source(trainer, tokenizer)
    reference = ReferenceWeights(trainer, is_anew=trainer.state.iteration == 0) if config.grpo_kl_beta else None
    teacher = None if config.opd_teacher_load is None else open_teacher(config.opd_teacher_load, trainer, tokenizer)
    reward_model = None if config.reward_model is None else RewardModel(config.reward_model, trainer)
    rewards = None
    if source is not None:
        rewards = together(groups.world, lambda: start_processes(RewardPool, source, config, groups))
    environment, turn_encoder = None, None
    if turns is not None:
        environment = together(groups.world, lambda: start_processes(FunctionPool, turns, config, groups))
        turn_encoder = TurnEncoder(tokenizer)
    rollouts = Rollouts(config, groups, sampler, prompts.at, rewards, seed, environment, turn_encoder, reward_model)
    trainer.readers = Splits(
        RolloutReader(trainer, rollouts, Policy(config, groups.dp), reference, held_out, teacher), None, None
    )
    return trainer


def reward_source(config: RLConfig) -> RewardSource | None:
    """Returns the reward function that the flags name; None: they name none. Raises ConfigError for a file that does
    not exist."""
    if config.rm_type is not None:
        return built_in_source(config.rm_type, config.rm_argument)
    if config.custom_rm_path is None:
        return None
    return file_source(config.custom_rm_path, dataclasses.asdict(config))


def answer_source(trainer: Trainer, tokenizer: Tokenizer) -> AnswerSource:
    """Returns what answers prompts: the model itself, or an engine of the user. Collective over the world. Raises
    UserError."""
    run, config = trainer.run, trainer.run.rl
    ends, temperature = stop_ids(run.tokenizer, run.checkpoint.load_hf), config.rollout_temperature
    if config.rl_external_sampler is not None:
        return ExternalSampler(trainer, tokenizer, config.rl_external_sampler, temperature=temperature, stop_ids=ends)
    sampler = Sampler(
        trainer, tokenizer, temperature=temperature, batch_size=config.rl_generation_batch_size, stop_ids=ends
    )
    shape = sampling_shape(run, trainer.settings)
    together(trainer.groups.world, lambda: sampler.check_room(shape.slots, shape.capacity))
    return sampler


def start_processes(
    pool: type[_Pool], source: RewardSource | EnvironmentSource, config: RLConfig, groups: Groups
) -> _Pool | None:
    """Returns processes that call a function, on the first rank of each replica, and None on the others. Raises
    FunctionError."""
    if groups.model.rank != 0:
        return None
    return pool(source, workers=config.rm_workers, call_seconds=config.rm_timeout, replacement=config.rm_on_error)


def prompt_options(run: RunConfig, files: Sequence[str], source: RewardSource | None) -> PromptOptions:
    """Returns how prompts are read from these files."""
    config = run.rl
    assert run.data.seq_length and config.rollout_max_response_len
    return PromptOptions(
        prompt_data=tuple(files),
        input_key=config.input_key,
        label_key=config.label_key,
        max_length=config.rollout_max_prompt_len or run.data.seq_length - config.rollout_max_response_len,
        apply_chat_template=config.apply_chat_template,
        add_bos=config.add_bos,
        needs_label=source is not None and source.needs_label,
    )


def preference_options(run: RunConfig, files: Sequence[str]) -> PreferenceOptions:
    """Returns how pairs of answers are read from these files."""
    config = run.rl
    assert run.data.seq_length
    return PreferenceOptions(
        preference_data=tuple(files),
        max_length=run.data.seq_length,
        input_key=config.input_key,
        apply_chat_template=config.apply_chat_template,
        add_bos=config.add_bos,
    )


def callbacks(trainer: Trainer, metrics: Metrics) -> list[Callback]:
    """Returns the callbacks that a run has beyond those of training."""
    reader = trainer.readers.train
    if isinstance(reader, PreferenceReader):
        of_pairs: list[Callback] = [LogReports(reader.reports, metrics, subject="pairs of step", tag="dpo")]
        return of_pairs if reader.held_out is None else [*of_pairs, EvaluatePairs(reader, metrics)]
    assert isinstance(reader, RolloutReader)
    result: list[Callback] = [LogRollouts(reader, metrics)]
    if reader.held_out is not None:
        result.append(EvaluateAnswers(reader, metrics))
    return result
