"""Rules about --dynamic-context-parallel, which computes documents on groups of different sizes."""

from __future__ import annotations

from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.context_parallel import attention_comm_types, copies_of_keys, group_sizes
from megatron.config.mesh import mesh_of
from megatron.config.moe_training import AUX, GLOBAL_AUX, SEQ_AUX, SINKHORN
from megatron.config.recompute import BALANCED
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig

_FLAG = "--dynamic-context-parallel"
_LENGTH = "--max-seqlen-per-dp-cp-rank"


def documents_are_separate(run: RunConfig) -> str | None:
    """Only documents that do not attend to each other can be computed apart."""
    if run.data.separate_documents:
        return None
    return (
        f"{_FLAG} shares out documents, but attention crosses their ends; add --reset-attention-mask, or train on "
        "conversations with finetune.py"
    )


def rank_length_is_given(run: RunConfig) -> str | None:
    """It decides how many ranks a document needs."""
    if run.parallel.max_seqlen_per_dp_cp_rank is not None:
        return None
    return (
        f"{_FLAG} needs to know the most tokens of a microbatch on a rank; give {_LENGTH}, such as "
        f"{run.data.seq_length}"
    )


def rank_length_is_cut_evenly(run: RunConfig) -> str | None:
    """Each rank holds two equal chunks of a sequence, and sequence parallelism divides each of them."""
    parallel = run.parallel
    tokens, tp = parallel.max_seqlen_per_dp_cp_rank, parallel.tensor_model_parallel_size
    step = 2 * (tp if parallel.sequence_parallel else 1)
    if tokens is None or tokens % step == 0:
        return None
    by = f" x --tensor-model-parallel-size {tp} under --sequence-parallel" if parallel.sequence_parallel else " chunks"
    return f"{_LENGTH} {tokens} is not a multiple of 2{by}; give {-(-tokens // step) * step}"


def smallest_group_divides_ranks(run: RunConfig, world_size: int) -> str | None:
    """Groups are runs of 2^k ranks of dp x cp, and all ranks are in a group of every size."""
    mesh = mesh_of(run.parallel, world_size)
    sizes = group_sizes(run.parallel, mesh)
    if sizes is None or sizes.smallest in sizes.all:
        return None
    return (
        f"--min-dynamic-context-parallel-size {sizes.smallest} is not a power of two that divides the {sizes.ranks} "
        f"ranks of data-parallel size {mesh.dp} x context-parallel size {mesh.cp}; give a power of two up to "
        f"{sizes.largest}"
    )


def largest_group_holds_samples(run: RunConfig, world_size: int) -> str | None:
    """A sample may be one document."""
    assert run.data.seq_length
    sizes = group_sizes(run.parallel, mesh_of(run.parallel, world_size))
    if sizes is None or run.data.seq_length <= sizes.longest:
        return None
    return (
        f"a document of --seq-length {run.data.seq_length} is longer than {_LENGTH} {sizes.tokens} x the largest group "
        f"of {sizes.largest} ranks, a power of two that divides dp x cp = {sizes.ranks}: {sizes.longest} tokens; give "
        f"{_LENGTH} {-(-run.data.seq_length // sizes.largest)} or more, or start more processes"
    )


def attention_is_ring_or_a2a(run: RunConfig) -> str | None:
    """The other types start their messages early, or have two sizes, which are set up for one number of ranks."""
    assert run.model.num_layers
    unsupported = sorted(set(attention_comm_types(run.parallel, run.model.num_layers)) - {"p2p", "a2a"})
    if not unsupported:
        return None
    return f"{_FLAG} has no --cp-comm-type {' or '.join(unsupported)} for groups of every size; give p2p or a2a"


def heads_fit_every_group(run: RunConfig, world_size: int) -> str | None:
    """Under a2a the ranks of a group share the heads."""
    assert run.model.num_layers and run.model.num_attention_heads
    sizes = group_sizes(run.parallel, mesh_of(run.parallel, world_size))
    if sizes is None or "a2a" not in attention_comm_types(run.parallel, run.model.num_layers):
        return None
    tp = run.parallel.tensor_model_parallel_size
    heads = run.model.num_attention_heads // tp, max(1, run.model.num_kv_heads // tp)  # of a tensor-parallel rank
    try:
        for size in sizes.all:
            copies_of_keys(*heads, size)
    except ConfigError as error:
        return f"{_FLAG} with groups of up to {sizes.largest} ranks: {error}"
    return None


def probabilities_are_kept(run: RunConfig) -> str | None:
    """The seed of dropped probabilities is drawn by the ranks of cp together."""
    if not run.model.attention_dropout:
        return None
    return f"{_FLAG} cannot drop probabilities with --attention-dropout {run.model.attention_dropout:g}; give 0"


def balance_counts_no_samples(run: RunConfig) -> str | None:
    """Losses, choices and limits of experts that count the tokens of a sample or microbatch would depend on which
    documents it holds."""
    if not run.model.num_experts:
        return None
    pairs = zip(run.moe.moe_router_load_balancing_type, run.moe.moe_aux_loss_coeff, strict=True)
    counting = [kind for kind, coefficient in pairs if kind == SINKHORN or (kind in (AUX, SEQ_AUX) and coefficient)]
    if counting:
        return (
            f"{_FLAG} makes microbatches of other documents, whose tokens --moe-router-load-balancing-type "
            f"{' '.join(counting)} counts; give {GLOBAL_AUX}"
        )
    if run.moe.moe_expert_capacity_factor is not None:
        return (
            f"{_FLAG} makes microbatches of other documents, whose tokens --moe-expert-capacity-factor "
            f"{run.moe.moe_expert_capacity_factor:g} limits; remove it"
        )
    return None


def products_are_scaled_alone(run: RunConfig) -> str | None:
    """The scales of FP8 products follow from the tokens of all ranks of cp."""
    if run.fp8.fp8_format is None:
        return None
    return f"{_FLAG} has no scales of --fp8-format {run.fp8.fp8_format} for groups of every size; remove one of them"


def recompute_is_not_measured(run: RunConfig) -> str | None:
    """Balanced recompute measures layers on samples that the ranks of cp share."""
    if run.recompute.recompute_policy != BALANCED:
        return None
    return (
        f"{_FLAG} has microbatches of other sizes than --recompute-policy {BALANCED} measures; name --recompute-modules"
    )


def experts_have_equal_chunks(run: RunConfig) -> str | None:
    """The ranks that share experts exchange the tokens of one chunk after the other, so all have as many chunks. Those
    of tp have the same documents."""
    parallel, chunk = run.parallel, run.recompute.mlp_chunk_size
    tp = parallel.tensor_model_parallel_size
    shared = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp) > tp
    if chunk is None or not run.model.num_experts or not shared:
        return None
    return (
        f"{_FLAG} gives the ranks that share experts different numbers of tokens, which --mlp-chunk-size {chunk} would "
        "cut into different numbers of chunks; remove one of them"
    )


def run_has_documents(run: RunConfig) -> str | None:
    """A trace has samples without content."""
    if not run.dry_run.dry_run:
        return None
    return f"--dry-run traces samples without documents; remove it, or {_FLAG}"


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules of a run with --dynamic-context-parallel."""
    if not run.parallel.dynamic_context_parallel:
        return []
    lengths = [partial(documents_are_separate, run), partial(rank_length_is_given, run)]
    sizes = [
        partial(rank_length_is_cut_evenly, run),
        partial(smallest_group_divides_ranks, run, world_size),
        partial(largest_group_holds_samples, run, world_size),
    ]
    features = [
        partial(probabilities_are_kept, run),
        partial(balance_counts_no_samples, run),
        partial(products_are_scaled_alone, run),
        partial(recompute_is_not_measured, run),
        partial(experts_have_equal_chunks, run),
        partial(run_has_documents, run),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return [*lengths, *sizes, *features]
    attention = [partial(attention_is_ring_or_a2a, run), partial(heads_fit_every_group, run, world_size)]
    return [*lengths, *sizes, *attention, *features]
