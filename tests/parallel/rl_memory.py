"""Measures the memory of runs that learn from rewards or preferences: answers and pairs of the longest length."""

import json
import random
import tempfile
from pathlib import Path

from megatron.core.datasets.sample import Splits
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.rl.learner import RolloutReader
from megatron.rl.main import build as build_with_pairs
from megatron.rl.policy import Policy
from megatron.rl.prompts import Prompt
from megatron.rl.reference import ReferenceWeights
from megatron.rl.rewards import Reward, RewardBatch
from megatron.rl.rollout import Rollouts
from megatron.rl.sampler import Sampler
from megatron.tooling.memory_check import CPU, configured, measure
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import assemble, build, read_files
from tests import pool

WORDS = 60  # ids of prompts, below the vocabularies of the tests


class OneForAll:
    """Gives every answer the same reward, without processes."""

    def score(self, answers):
        return RewardBatch(tuple(Reward(1.0) for _ in answers))

    def close(self):
        pass


def build_with_sampler(run, groups, device):
    """Returns the trainer of a run that samples answers to the longest prompts."""
    run, checkpoint, tokenizer = read_files(run, groups)
    trainer = assemble(
        run, checkpoint, groups, Streams(device, Timeline(device)), lambda settings, state: Splits(None, None, None)
    )
    config, draw = run.rl, random.Random(1)
    ids = tuple(draw.randrange(WORDS) for _ in range(run.data.seq_length - config.rollout_max_response_len))
    sampler = Sampler(
        trainer,
        tokenizer,
        temperature=1.0,
        batch_size=config.rl_generation_batch_size,
    )
    rewards = OneForAll() if groups.model.rank == 0 else None
    rollouts = Rollouts(config, groups, sampler, lambda number: Prompt(number, ids, "", None, {}), rewards, 1)
    reference = ReferenceWeights(trainer, is_anew=True) if config.grpo_kl_beta else None
    trainer.readers = Splits(RolloutReader(trainer, rollouts, Policy(config, groups.dp), reference, None), None, None)
    return trainer


def measure_sampled(rank, world_size, flags):
    """See `measure`."""
    flags = f"{flags} --perform-rl-step --prompt-data none --rm-type length"
    return measure(rank, world_size, flags, builder=build_with_sampler)


def measure_preferred(rank, world_size, flags, pairs, length):
    """See `measure`. pairs: their number, each with two answers of `length` tokens."""
    draw = random.Random(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        texts = [[" ".join(str(draw.randrange(WORDS)) for _ in range(length)) for _ in range(2)] for _ in range(pairs)]
        path.write_text("".join(json.dumps({"prompt": "1", "chosen": a, "rejected": b}) + "\n" for a, b in texts))
        flags = f"{flags} --perform-rl-step --preference-data {path}"
        return measure(rank, world_size, flags, builder=build_with_pairs)


def save_base(rank, world_size, flags, folder):
    """Saves the model of these flags as it begins."""
    run = configured(f"{flags} --save {folder} --save-interval 9", world_size)
    save_checkpoint(build(run, pool.groups(), CPU))
