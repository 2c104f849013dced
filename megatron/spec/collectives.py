"""The collectives of tensor, context and expert parallelism that a layer and the two ends of the model issue, in order.

docs/sharding.md has them as tables, and tests compare both with the calls of real modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.spec.attention import AttentionSpec, CoreSpec
from megatron.spec.decoder import LayerSpec
from megatron.spec.delta_net import DeltaCoreSpec, DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec
from megatron.spec.mlp import MLPSpec
from megatron.spec.moe import MoESpec
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import FP32, INT32, INT64, Sizes

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ALL_TO_ALL, ALL_TO_ALL_V, SHIFT = "all_to_all", "all_to_all_v", "shift"


@dataclass(frozen=True)
class Collective:
    """One call on a group of core/groups.py. `nbytes` is the size of each rank's input."""

    op: str
    group: str
    nbytes: int


@dataclass(frozen=True)
class Calls:
    """The collectives of a forward and of its backward."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()


def linear_collectives(spec: LinearSpec, sizes: Sizes) -> Calls:
    """A column layer gathers its input and sums the input's gradient; a row layer sums its output; a replicated one
    communicates nothing."""
    if sizes.tp == 1 or spec.parallel == REPLICATED:
        return Calls()
    features = spec.local_features(sizes.tp)[0 if spec.parallel == COLUMN else 1]
    whole = sizes.tokens * features * sizes.e
    summed = (Collective(ALL_REDUCE if sizes.sp == 1 else REDUCE_SCATTER, "tp", whole),)
    gathered = () if sizes.sp == 1 else (Collective(ALL_GATHER, "tp", whole // sizes.sp),)
    if spec.parallel == COLUMN:
        return Calls(gathered, (*gathered, *summed))
    return Calls(summed, gathered)


def context_collectives(core: CoreSpec, sizes: Sizes) -> Calls:
    """Attention over a sequence that is sharded over cp. The kinds are those of --cp-comm-type."""
    if sizes.cp == 1:
        return Calls()
    inner = {"a2a": sizes.cp, "a2a+p2p": sizes.cp_inner}.get(sizes.comm_type, 1)
    heads, groups = core.heads // sizes.tp, max(core.local_groups(sizes.tp), inner)  # repeated where they are few
    queries, output = (heads * dim * sizes.tokens * sizes.e for dim in (core.qk_dim, core.v_dim))
    keys = groups * (core.qk_dim + core.v_dim) * sizes.tokens * sizes.e  # keys and values
    if sizes.comm_type == "all_gather":
        gather = Collective(ALL_GATHER, "cp", keys)
        return Calls((gather,), (gather, Collective(REDUCE_SCATTER, "cp", sizes.cp * keys)))
    ring = (Collective(SHIFT, "cp_outer" if inner > 1 else "cp", keys),) * (sizes.cp // inner - 1)
    if inner == 1:
        return Calls(ring, ring * 2)
    group = "cp" if sizes.comm_type == "a2a" else "cp_inner"
    to_heads, back = Collective(ALL_TO_ALL, group, queries + keys), Collective(ALL_TO_ALL, group, output)
    return Calls((to_heads, *ring, back), (back, *ring * 2, to_heads))


def norm_collectives(spec: NormSpec | None, sizes: Sizes) -> Calls:
    """A norm whose channels are sharded averages one number per token, and in backward another one."""
    if spec is None or spec.heads is None or sizes.tp == 1:
        return Calls()
    mean = (Collective(ALL_REDUCE, "tp", sizes.tokens * FP32),)
    return Calls(mean, mean)


def mlp_collectives(spec: MLPSpec, sizes: Sizes) -> Calls:
    """fc1 and fc2."""
    fc1, fc2 = (linear_collectives(linear, sizes) for linear in (spec.linear_fc1, spec.linear_fc2))
    return Calls(fc1.forward + fc2.forward, fc2.backward + fc1.backward)


def moe_collectives(spec: MoESpec, sizes: Sizes) -> Calls:
    """The exchange of tokens under `sizes.load`, and shared experts while tokens are on their way.

    The router communicates only for balance losses over samples and for capacities, which are not included.
    """
    assert sizes.load is not None
    shared = Calls() if spec.shared is None else mlp_collectives(spec.shared, sizes)
    exchange = exchange_collectives(
        ExchangeSizes(
            experts=spec.router.experts,
            ep=sizes.load.ranks // sizes.load.etp,
            etp=sizes.load.etp,
            tokens=sizes.rows,
            topk=spec.router.topk,
            sent_rows=sizes.load.sent,
            assignments=sizes.load.assigned,
            received_rows=sizes.load.received,
            received_assignments=sizes.load.worked,
            row=sizes.h * sizes.e,
        )
    )
    sent, back = exchange.forward[:-1], exchange.forward[-1:]
    return Calls(sent + shared.forward + back, exchange.backward + shared.backward)


def layer_collectives(spec: LayerSpec, sizes: Sizes) -> Calls:
    """One decoder layer. The backward's gather of keys and values is begun before the gradients of the MLP."""
    attention, context = spec.attention, Calls()
    if isinstance(attention, DeltaNetSpec):
        keys, queries = _delta_projections(attention, sizes), delta_collectives(attention.core, sizes)
    else:
        keys, queries = (
            latent_collectives(attention, sizes)
            if isinstance(attention, LatentAttentionSpec)
            else grouped_collectives(attention, sizes)
        )
        context = context_collectives(attention.core, sizes)
    projection = linear_collectives(attention.linear_proj, sizes)
    mlp = moe_collectives(spec.mlp, sizes) if isinstance(spec.mlp, MoESpec) else mlp_collectives(spec.mlp, sizes)
    early = 1 if sizes.comm_type == "all_gather" and context.forward else 0
    return Calls(
        keys.forward
        + context.forward[:early]
        + queries.forward
        + context.forward[early:]
        + projection.forward
        + mlp.forward,
        context.backward[:early]
        + mlp.backward
        + projection.backward
        + context.backward[early:]
        + queries.backward
        + keys.backward,
    )


def grouped_collectives(spec: AttentionSpec, sizes: Sizes) -> tuple[Calls, Calls]:
    """The projection to queries, keys and values, and the norm of keys; then the norm of queries."""
    qkv = linear_collectives(spec.linear_qkv, sizes)
    queries, keys = (norm_collectives(norm, sizes) for norm in (spec.q_norm, spec.k_norm))
    return Calls(qkv.forward + keys.forward, keys.backward + qkv.backward), queries


def _delta_projections(spec: DeltaNetSpec, sizes: Sizes) -> Calls:
    """The projections before the state."""
    calls = linear_collectives(spec.in_proj, sizes)
    if spec.latents is None:
        return calls
    decay, gate = (linear_collectives(linear, sizes) for linear in (spec.latents.decay, spec.latents.gate))
    return Calls(calls.forward + decay.forward + gate.forward, gate.backward + decay.backward + calls.backward)


def delta_collectives(core: DeltaCoreSpec, sizes: Sizes) -> Calls:
    """A delta net over a sequence that is sharded over cp: the last inputs of the convolution, and heads or states."""
    if sizes.cp == 1:
        return Calls()
    keys, heads = core.key_heads // sizes.tp, core.value_heads // sizes.tp
    ends = 2 * min(core.taps - 1, sizes.s // 2) * sizes.b * keys * core.convolved * sizes.e
    gather, scatter = Collective(ALL_GATHER, "cp", ends), Collective(REDUCE_SCATTER, "cp", sizes.cp * ends)
    if sizes.comm_type != "a2a":
        states = 2 * sizes.b * heads * core.qk_dim * (core.qk_dim + core.v_dim) * FP32
        passed = Collective(ALL_GATHER, "cp", states)
        return Calls((gather, passed), (passed, scatter))
    to_heads = Collective(ALL_TO_ALL, "cp", sizes.tokens * keys * core.convolved * sizes.e)
    rates = Collective(ALL_TO_ALL, "cp", sizes.tokens * (core.decay_channels + 1) * heads * FP32)
    back = Collective(ALL_TO_ALL, "cp", sizes.tokens * heads * core.v_dim * sizes.e)
    return Calls((gather, to_heads, rates, back), (back, rates, to_heads, scatter))


def latent_collectives(spec: LatentAttentionSpec, sizes: Sizes) -> tuple[Calls, Calls]:
    """The projections to keys and values, and to queries. The channels of keys that all heads share are gathered."""
    queries, keys = linear_collectives(spec.q_up, sizes), linear_collectives(spec.kv_up, sizes)
    shared = Calls()
    if sizes.tp > 1:
        whole = sizes.tokens * spec.rotated * sizes.e
        gather = () if sizes.sp == 1 else (Collective(ALL_GATHER, "tp", whole // sizes.sp),)
        shared = Calls(gather, (Collective(ALL_REDUCE if sizes.sp == 1 else REDUCE_SCATTER, "tp", whole),))
    up = Calls(shared.forward + keys.forward, keys.backward + shared.backward)
    if spec.q_down is not None:
        return up, queries
    # The hidden states are projected to queries before those of keys and values.
    return Calls(queries.forward + up.forward, up.backward + queries.backward), Calls()


def embedding_collectives(sizes: Sizes) -> Calls:
    """The sum of the shards' rows, of which each token has one."""
    if sizes.tp == 1:
        return Calls()
    if sizes.sp == 1:
        return Calls((Collective(ALL_REDUCE, "tp", sizes.whole),))
    return Calls((Collective(REDUCE_SCATTER, "tp", sizes.whole),), (Collective(ALL_GATHER, "tp", sizes.hidden),))


def loss_collectives(sizes: Sizes) -> Calls:
    """Each token's largest logit; then its sum of exponentials and its target's logit."""
    if sizes.tp == 1:
        return Calls()
    return Calls(tuple(Collective(ALL_REDUCE, "tp", numbers * sizes.tokens * FP32) for numbers in (1, 2)))


@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """What one rank sends and receives in a layer with experts, which depends on the routing.

    tokens: the tokens of this rank, each with `topk` experts. sent_rows: these tokens, once for each rank of etp x ep
    to which they go, itself included. assignments: their pairs of token and expert. received_rows,
    received_assignments: the rows and pairs that all ranks send to this one. row: bytes of a row.
    """

    experts: int
    ep: int
    etp: int
    tokens: int
    topk: int
    sent_rows: int
    assignments: int
    received_rows: int
    received_assignments: int
    row: int


def exchange_collectives(sizes: ExchangeSizes) -> Calls:
    """The all-to-all dispatcher: exchanges counts, experts and weights of rows, the rows, and the results.

    Its backward exchanges the gradients of results, weights and rows.
    """
    if sizes.ep * sizes.etp == 1:
        return Calls()

    def exchange(nbytes: int) -> Collective:
        return Collective(ALL_TO_ALL_V, "etp_ep", nbytes)

    counts = sizes.ep * sizes.etp * (sizes.experts // sizes.ep + 1) * INT32
    sent, received = exchange(sizes.sent_rows * sizes.row), exchange(sizes.received_rows * sizes.row)
    assigned = exchange(sizes.etp * sizes.assignments * (INT32 + FP32))
    return Calls(
        (Collective(ALL_TO_ALL, "etp_ep", counts), assigned, sent, received),
        (sent, exchange(sizes.received_assignments * FP32), received),
    )


def gathered_exchange_collectives(sizes: ExchangeSizes) -> Calls:
    """The all-gather dispatcher: all-gathers indices, tokens and weights, and reduce-scatters the results.

    Its backward communicates the gradients of tokens, weights and results.
    """
    n = sizes.ep * sizes.etp
    if n == 1:
        return Calls()
    chosen, hidden = sizes.tokens * sizes.topk, sizes.tokens * sizes.row

    def gather(nbytes: int) -> Collective:
        return Collective(ALL_GATHER, "etp_ep", nbytes)

    def scatter(nbytes: int) -> Collective:
        return Collective(REDUCE_SCATTER, "etp_ep", n * nbytes)

    return Calls(
        (gather(chosen * INT64), gather(hidden), gather(chosen * FP32), scatter(hidden)),
        (gather(hidden), scatter(chosen * FP32), scatter(hidden)),
    )
