"""Builds a run that learns from rewards, or from preferences: everything of a training run, with a sampler, or pairs of
answers, in place of its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

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
from megatron.rl.callbacks import EvaluateAnswers, LogReports, LogRollouts
from megatron.rl.learner import RolloutReader
from megatron.rl.policy import Policy
from megatron.rl.preference_data import PreferenceOptions, load_preferences
from megatron.rl.preference_reader import PreferenceReader
from megatron.rl.prompts import Prompt, PromptOptions, PromptSet, load_prompts
from megatron.rl.reference import ReferenceWeights
from megatron.rl.reward_workers import RewardPool
from megatron.rl.rewards import RewardSource, built_in_source, file_source
from megatron.rl.rollout import Rollouts
from megatron.rl.sampler import Sampler
from megatron.training import main as training
from megatron.training.logging.writers import Metrics
from megatron.training.loop import Callback
from megatron.training.setup import assemble, read_files
from megatron.training.together import together
from megatron.training.trainer import Trainer


def main(run: RunConfig) -> None:
    """Builds and trains the run of a command line; see training/main.py."""
    training.main(run, build, callbacks)


def build(run: RunConfig, groups: Groups, device: torch.device) -> Trainer:
    """Builds the trainer, and the reader that samples its batches or reads pairs. Collective over the world. Raises
    UserError."""
    run, checkpoint, tokenizer = read_files(run, groups)
    streams = Streams(device, Timeline(device))
    if run.rl.preference_data is not None:
        pairs = together(groups.world, lambda: load_preferences(preference_options(run), tokenizer, run.train.seed))
        trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))
        reference = ReferenceWeights(trainer, is_anew=trainer.state.iteration == 0)
        trainer.readers = Splits(PreferenceReader(trainer, pairs, reference), None, None)
        return trainer
    return build_with_sampler(run, checkpoint, tokenizer, groups, streams)


def build_with_sampler(
    run: RunConfig, checkpoint: Path | None, tokenizer: Tokenizer, groups: Groups, streams: Streams
) -> Trainer:
    """Builds the trainer, and the reader that samples its batches, of a run whose files have been read. Collective over
    the world. Raises UserError."""
    config = run.rl
    source, seed = reward_source(config), run.train.seed

    def read_prompts(files: tuple[str, ...] | None) -> PromptSet[Prompt] | None:
        if files is None:
            return None
        return together(groups.world, lambda: load_prompts(prompt_options(run, files, source), tokenizer, seed))

    prompts, held_out = read_prompts(config.prompt_data), read_prompts(config.eval_prompt_data)
    assert prompts is not None and config.rollout_max_response_len
    trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))
    groups = trainer.groups
    sampler = Sampler(
        trainer,
        tokenizer,
        temperature=config.rollout_temperature,
        max_new_tokens=config.rollout_max_response_len,
        batch_size=config.rl_generation_batch_size,
        stop_ids=stop_ids(run.tokenizer, run.checkpoint.load_hf),
    )
    shape = sampling_shape(run, trainer.settings)
    together(groups.world, lambda: sampler.check_room(shape.slots, shape.capacity))
    reference = ReferenceWeights(trainer, is_anew=trainer.state.iteration == 0) if config.grpo_kl_beta else None
    rewards = together(
        groups.world,
        lambda: (
            RewardPool(
                source, workers=config.rm_workers, call_seconds=config.rm_timeout, replacement=config.rm_on_error
            )
            if groups.model.rank == 0
            else None
        ),
    )
    rollouts = Rollouts(config, groups, sampler, prompts.at, rewards, seed)
    trainer.readers = Splits(
        RolloutReader(trainer, rollouts, Policy(config, groups.dp), reference, held_out), None, None
    )
    return trainer


def reward_source(config: RLConfig) -> RewardSource:
    """Returns the reward function that the flags name. Raises ConfigError for a file that does not exist."""
    if config.rm_type is not None:
        return built_in_source(config.rm_type, config.rm_argument)
    assert config.custom_rm_path is not None
    return file_source(config.custom_rm_path, dataclasses.asdict(config))


def prompt_options(run: RunConfig, files: Sequence[str], source: RewardSource) -> PromptOptions:
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
        needs_label=source.needs_label,
    )


def preference_options(run: RunConfig) -> PreferenceOptions:
    """Returns how pairs of answers are read."""
    config = run.rl
    assert run.data.seq_length and config.preference_data is not None
    return PreferenceOptions(
        preference_data=config.preference_data,
        max_length=run.data.seq_length,
        input_key=config.input_key,
        apply_chat_template=config.apply_chat_template,
        add_bos=config.add_bos,
    )


def callbacks(trainer: Trainer, metrics: Metrics) -> list[Callback]:
    """Returns the callbacks that a run has beyond those of training."""
    reader = trainer.readers.train
    if isinstance(reader, PreferenceReader):
        return [LogReports(reader.reports, metrics, subject="pairs of step", tag="dpo")]
    assert isinstance(reader, RolloutReader)
    result: list[Callback] = [LogRollouts(reader, metrics)]
    if reader.held_out is not None:
        result.append(EvaluateAnswers(reader, metrics))
    return result
