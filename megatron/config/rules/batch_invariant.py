"""Rules about --batch-invariant-mode: what would give a token other numbers in training than in generation."""

from __future__ import annotations

from functools import partial

from megatron.config.data import DataConfig
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.moe_training import ALL_GATHER, SINKHORN, MoEConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig

_FLAG = "--batch-invariant-mode"


def invariant_layers_are_our_own(model: ModelConfig) -> str | None:
    """Transformer Engine chooses its algorithms by the number of tokens."""
    if model.transformer_impl != "local":
        return f"{_FLAG} has no --transformer-impl {model.transformer_impl}; give local"
    return None


def invariant_products_are_not_in_fp8(fp8: Fp8Config) -> str | None:
    """A scale follows from all tokens of a tensor."""
    if fp8.enabled:
        return (
            f"{_FLAG} has no --fp8-format {fp8.fp8_format}, whose scales follow from all tokens of a batch; leave out "
            "one of them"
        )
    return None


def invariant_tokens_are_not_dropped(model: ModelConfig) -> str | None:
    """Generation has no dropout."""
    rates = {
        "--attention-dropout": model.attention_dropout,
        "--hidden-dropout": model.hidden_dropout,
        "--lora-dropout": model.lora_dropout if model.lora_rank is not None else 0.0,
    }
    for name, rate in rates.items():
        if rate > 0.0:
            return f"{_FLAG} gives training the numbers of generation, which has no dropout; give {name} 0, not {rate}"
    return None


def invariant_rotations_are_fixed(model: ModelConfig, data: DataConfig) -> str | None:
    """A token that was sampled early in a long sequence was rotated by other factors than training rotates it by."""
    if model.position_embedding_type == "longrope":
        return (
            f"{_FLAG} excludes --position-embedding-type longrope, whose rotations of all tokens change when a "
            "sequence grows beyond the original context; leave out one of them"
        )
    factor, longest = model.dynamic_ntk_factor, model.max_position_embeddings
    if factor is not None and longest is not None and data.seq_length is not None and data.seq_length > longest:
        return (
            f"{_FLAG} excludes --dynamic-ntk-factor {factor} where --seq-length {data.seq_length} is above "
            f"--max-position-embeddings {longest}, up to which tokens are generated with another rotation; lower it"
        )
    return None


def invariant_sequences_are_whole(parallel: ParallelConfig) -> str | None:
    """Rings and gathers go over blocks of keys whose borders follow from the number of ranks; a2a does not."""
    others = [kind for kind in parallel.cp_comm_type if kind != "a2a"]
    if parallel.dynamic_context_parallel:
        return f"{_FLAG} excludes --dynamic-context-parallel, which cuts a document as its length asks; leave out one"
    if parallel.context_parallel_size > 1 and others:
        return (
            f"{_FLAG} excludes --cp-comm-type {others[0]}, whose blocks of keys follow from "
            f"--context-parallel-size {parallel.context_parallel_size}; give --cp-comm-type a2a"
        )
    return None


def invariant_sums_are_in_rank_order(parallel: ParallelConfig) -> str | None:
    """A ring adds a chunk's terms in an order that depends on the chunk's place."""
    if parallel.tp_comm_overlap:
        return (
            f"{_FLAG} adds over tp in rank order, and --tp-comm-overlap in the order of a ring; leave out one of them"
        )
    return None


def invariant_tokens_choose_alone(moe: MoEConfig) -> str | None:
    """A token's experts do not depend on the other tokens, or on their number."""
    dependent = {
        "--moe-expert-capacity-factor": moe.moe_expert_capacity_factor is not None,
        "--moe-router-force-load-balancing": moe.moe_router_force_load_balancing,
        f"--moe-router-load-balancing-type {SINKHORN}": SINKHORN in moe.moe_router_load_balancing_type,
    }
    for name, given in dependent.items():
        if given:
            return f"{_FLAG} excludes {name}, with which the other tokens decide about a token's experts; leave out one"
    return None


def invariant_sums_are_a_tree(moe: MoEConfig) -> str | None:
    """The reduce-scatter of the gathering dispatcher adds the results of experts from the first rank to the last."""
    if moe.moe_token_dispatcher_type == ALL_GATHER:
        return (
            f"{_FLAG} adds up the results of experts in an order that --moe-token-dispatcher-type {ALL_GATHER} does "
            "not have; give alltoall"
        )
    return None


def invariant_layers_have_attention(model: ModelConfig) -> str | None:
    """A delta net computes training in chunks of tokens, and generation one token at a time."""
    if model.has_delta_net:
        return (
            f"{_FLAG} excludes --experimental-attention-variant {model.experimental_attention_variant}, whose sums go "
            "over chunks of tokens in training and over one token in generation; leave out one of them"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules, if the mode is asked for."""
    if not run.model.batch_invariant_mode:
        return []
    return [
        partial(invariant_layers_are_our_own, run.model),
        partial(invariant_products_are_not_in_fp8, run.fp8),
        partial(invariant_tokens_are_not_dropped, run.model),
        partial(invariant_rotations_are_fixed, run.model, run.data),
        partial(invariant_layers_have_attention, run.model),
        partial(invariant_sequences_are_whole, run.parallel),
        partial(invariant_sums_are_in_rank_order, run.parallel),
        *([] if run.model.num_experts is None else _rules_of_experts(run.moe)),
    ]


def _rules_of_experts(moe: MoEConfig) -> list[ConfigRule]:
    return [partial(invariant_tokens_choose_alone, moe), partial(invariant_sums_are_a_tree, moe)]
