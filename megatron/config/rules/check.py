"""Cross-checks of a run's configuration: a list of small named rules. A message holds the values and the fix."""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules import activation_offload as rules_activation_offload
from megatron.config.rules import batch_invariant as rules_batch_invariant
from megatron.config.rules import cuda_graphs as rules_cuda_graphs
from megatron.config.rules import delta_net as rules_delta_net
from megatron.config.rules import dynamic_context as rules_dynamic_context
from megatron.config.rules import files as rules_files
from megatron.config.rules import fp8 as rules_fp8
from megatron.config.rules import latent_attention as rules_latent_attention
from megatron.config.rules import layout as rules_layout
from megatron.config.rules import model as rules_model
from megatron.config.rules import moe as rules_moe
from megatron.config.rules import optimizer_offload as rules_optimizer_offload
from megatron.config.rules import prediction as rules_prediction
from megatron.config.rules import recompute as rules_recompute
from megatron.config.rules import rl as rules_rl
from megatron.config.rules import sources as rules_sources
from megatron.config.rules import training as rules_training
from megatron.config.rules.needs import own_flags_have_an_effect
from megatron.config.rules.ranges import numbers_are_endless, numbers_are_in_range, values_are_known
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules that `run` has to obey.

    Plain values come first, so that no later rule divides by zero, and contradictions before flags without effect.
    """
    return [
        partial(values_are_known, run),
        partial(numbers_are_in_range, run),
        *rules_sources.rules(run),
        *rules_model.rules(run),
        *rules_latent_attention.rules(run),
        *rules_delta_net.rules(run),
        *rules_layout.rules(run, world_size),
        *rules_dynamic_context.rules(run, world_size),
        *rules_prediction.rules(run),
        *rules_moe.rules(run, world_size),
        *rules_fp8.rules(run),
        *rules_batch_invariant.rules(run),
        *rules_training.rules(run, world_size),
        *rules_files.rules(run),
        *rules_rl.rules(run, world_size),
        *rules_recompute.rules(run),
        *rules_activation_offload.rules(run),
        *rules_optimizer_offload.rules(run),
        *rules_cuda_graphs.rules(run),
        partial(own_flags_have_an_effect, run),
    ]


def check(run: RunConfig, world_size: int) -> None:
    """Raises ConfigError with every rule that `run` breaks on `world_size` processes, one line each.

    Pure; the same on every rank. With --use-checkpoint-args the rules about the model's shape are skipped while
    `run.model` has none: call this again once it has the checkpoint's shape.
    """
    broken = problems(run, world_size)
    if broken:
        raise ConfigError(*broken)


def problems(run: RunConfig, world_size: int) -> list[str]:
    """Returns one line for each rule that `run` breaks."""
    faults: list[str] = []
    for rule in rules(run, world_size):
        try:
            problem = rule()
        except Exception:
            if not faults:
                raise
            continue  # it relies on a condition that an earlier rule has found broken
        if problem is not None:
            faults.append(problem)
            if rule.func is numbers_are_in_range and numbers_are_endless(run):
                break  # other rules would count up to such a number
    return list(dict.fromkeys(faults))


def check_vocabulary(model: ModelConfig, tp: int, tokenizer_vocab_size: int, *, continues: bool = False) -> None:
    """Checks, once the tokenizer is read, that its ids fit the model and `tp` divides the padded vocabulary.

    `model.vocab_size` may still be None: then it is the tokenizer's. continues: whether the run goes on with the
    progress of a checkpoint, whose model cannot change. Raises ConfigError.
    """
    if model.vocab_size is not None and tokenizer_vocab_size > model.vocab_size:
        anew = " --finetune, which adds rows and starts a new run," if continues else ""
        raise ConfigError(
            f"the tokenizer has {tokenizer_vocab_size} ids but --vocab-size is {model.vocab_size}; give --vocab-size "
            f"{tokenizer_vocab_size}{anew} or another tokenizer"
        )
    shards = ParallelConfig(tensor_model_parallel_size=tp)
    sized = dataclasses.replace(model, vocab_size=model.vocab_size or tokenizer_vocab_size)
    for problem in (rules_model.padding_holds_vocabulary(sized), rules_layout.tp_divides_vocabulary(sized, shards)):
        if problem is not None:
            raise ConfigError(problem)
