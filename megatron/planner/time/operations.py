"""The operations of a decoder layer and of the two ends of the model on one rank, derived from the decoder's
description.

Counts of memory traffic are in channels per token that are read or written, of 2 bytes each. A kernel reads its inputs
and writes its outputs once.

| | forward | backward |
|---|---|---|
| norm, width h | 2 h | 3 h |
| residual addition | 3 h | 2 h |
| rotary, c = (heads + groups) d | 2 c | 2 c |
| gated activation, width f | 3 f | 5 f |
| plain activation | 2 f | 3 f |
| delta rule, per value head in fp32: k, v channels, chunks of C | 10 k + 6 v + 6 C | three times as much |
| convolution over t tokens in fp32, c channels | 3 t c | 6 t c |
| loss, per logit in bytes | 10 | 6 |
| cast of x channels to fp8, with its transposed copy | 2 x | 2 x |
| cast to mxfp8, in blocks along both dimensions | 3 x | 3 x |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.config.recompute import CORE_ATTN, MLA_UP_PROJ, MLP_ACT, NORM, WHOLE_MLP
from megatron.planner.time.hardware import BF16, FP8, MXFP8
from megatron.planner.time.software import Software
from megatron.spec.attention import AttentionSpec
from megatron.spec.collectives import (
    Collective,
    context_collectives,
    delta_collectives,
    embedding_collectives,
    linear_collectives,
    loss_collectives,
    moe_collectives,
)
from megatron.spec.decoder import DecoderSpec, EmbeddingSpec, LayerSpec
from megatron.spec.delta_net import CHUNK, DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec
from megatron.spec.mlp import MLPSpec
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import FP32, Sizes

CHANNEL = 2  # bytes of a channel of an activation
_ROUNDING = 175  # bytes that the kernels of torch move per element to widen a gradient and round it at random
FORWARD, INPUT_GRAD, WEIGHT_GRAD = "forward", "input_grad", "weight_grad"
ATTENTION_GRADIENT = "attention gradient"  # the name of attention's backward
FUSED, CAST, SCORE = "fused", "cast", "score"  # kinds of kernels that move memory
_CAST = {FP8: 2, MXFP8: 3}  # channels that the cast of one moves
_HEADS = ("heads", "rotary")  # kernels that put heads together from what is projected up from latents
_SINGLE = 15  # the time of a product in fp32, in units of one in bf16, by the data sheet of an H100
SLOW_SOFTMAX = 2.5  # traffic of a softmax of plain torch, in units of a fused one


@dataclass(frozen=True)
class Gemm:
    """`count` products [m, k] x [k, n] in one launch. accumulates: adds to fp32 sums in memory."""

    name: str
    m: float
    n: float
    k: float
    precision: str = BF16
    count: float = 1
    accumulates: bool = False


@dataclass(frozen=True)
class FusedAttention:
    """Attention without a matrix of scores. operations: those that a causal mask leaves."""

    name: str
    operations: float
    keys: float
    head_dim: int  # see CoreSpec


@dataclass(frozen=True)
class Traffic:
    """Kernels that move memory. kind: FUSED, CAST or SCORE, whose traffic differs from the count by a factor each."""

    name: str
    nbytes: float
    kind: str = FUSED


@dataclass(frozen=True)
class LayerMessage:
    """A collective. name: the layer that issues it, in both directions. behind: the operation that it is overlapped
    with. pieces: into how many pieces both are cut for it."""

    name: str
    call: Collective
    behind: Gemm | FusedAttention | None = None
    pieces: int = 1


Computation = Gemm | FusedAttention | Traffic
LayerOperation = Computation | LayerMessage


@dataclass(frozen=True)
class LayerWork:
    """The operations of one layer for a microbatch. again: those of its forward that backward repeats. modules: of each
    operation of the forward, the module that it belongs to, see config/recompute.py."""

    forward: tuple[LayerOperation, ...]
    input_grad: tuple[LayerOperation, ...]
    weight_grad: tuple[LayerOperation, ...]
    again: tuple[LayerOperation, ...] = ()
    experts: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """Communication of tensor parallelism that is overlapped: gathers and sums in pieces, and a column layer's
    backward."""

    gathers: bool
    sums: bool
    bulk_gather: bool
    bulk_sum: bool


def layer_work(
    layer: LayerSpec, sizes: Sizes, software: Software, overlap: Overlap, again: frozenset[str]
) -> LayerWork:
    """Returns the operations of a layer. again: the modules that backward recomputes, see config/recompute.py."""
    attention = list(
        _delta_net(layer.attention, sizes)
        if isinstance(layer.attention, DeltaNetSpec)
        else _attention(layer.attention, sizes, software)
    )
    has_latents = isinstance(layer.attention, LatentAttentionSpec)
    made_up: list[tuple[str, LayerOperation]] = [
        (phase, op) for phase, op in attention if has_latents and isinstance(op, Traffic) and op.name in _HEADS
    ]
    norms = [_norm(sizes, name) for name in ("attention norm", "MLP norm")]
    parts: list[tuple[str, list[tuple[str, LayerOperation]]]] = [
        (NORM, norms[0]),
        *(
            (MLA_UP_PROJ if name.endswith(" up") else "qkv", _linear(name, spec, sizes, software, overlap))
            for name, spec in _projections(layer.attention)
        ),
        (MLA_UP_PROJ, made_up),
        (CORE_ATTN, [op for op in attention if op not in made_up]),
        ("proj", _linear("proj", layer.attention.linear_proj, sizes, software, overlap)),
        (NORM, [] if layer.shares_norm else norms[1]),
        *_mlp(layer.mlp, sizes, software, overlap),
    ]
    for norm in (layer.post_attention_norm, layer.post_mlp_norm):
        if norm is not None:
            parts.append((NORM, _norm(sizes, "post norm")))
    in_phase = {
        phase: tuple(op for _, ops in parts for operation_phase, op in ops if operation_phase == phase)
        for phase in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
    }
    modules = tuple(part for part, ops in parts for operation_phase, _ in ops if operation_phase == FORWARD)
    work = LayerWork(
        in_phase[FORWARD],
        in_phase[INPUT_GRAD],
        in_phase[WEIGHT_GRAD],
        experts=isinstance(layer.mlp, MoESpec),
        modules=modules,
    )
    return dataclasses.replace(work, again=repeated(work, again))


def repeated(work: LayerWork, again: frozenset[str]) -> tuple[LayerOperation, ...]:
    """Returns the operations of a layer's forward that backward repeats, if it recomputes these modules."""
    whole = again | ({"fc1", "fc2", MLP_ACT} if WHOLE_MLP in again else set())
    return tuple(op for module, op in zip(work.modules, work.forward, strict=True) if module in whole)


def head_work(spec: DecoderSpec, sizes: Sizes) -> LayerWork:
    """Returns the operations of the final norm, the output layer and the loss, and of predictions of further tokens but
    for their layers, which are like those of the decoder. Products are in bf16."""
    by_phase: dict[str, list[LayerOperation]] = {FORWARD: [], INPUT_GRAD: [], WEIGHT_GRAD: []}

    def add(operations: Iterable[tuple[str, LayerOperation]]) -> None:
        for phase, operation in operations:
            by_phase[phase].append(operation)

    for prediction in spec.predictions:
        embedding = embedding_work(spec.embedding, sizes)
        for phase in by_phase:
            add((phase, operation) for operation in getattr(embedding, phase))
        # Both as one tensor are as much traffic as a residual addition.
        add(_norm(sizes, "norm of the known token"))
        add(_norm(sizes, "norm of hidden states"))
        inputs, outputs = prediction.projection.local_features(sizes.tp)
        name = "prediction's projection"
        add(
            [
                (FORWARD, Gemm(name, sizes.rows, outputs, inputs)),
                (INPUT_GRAD, Gemm(f"{name}, input gradient", sizes.rows, inputs, outputs)),
                (WEIGHT_GRAD, Gemm(f"{name}, weight gradient", outputs, inputs, sizes.rows, accumulates=True)),
                *((WEIGHT_GRAD, operation) for operation in _rounded_grad(name, sizes, inputs * outputs)),
            ]
        )
    for _ in range(1 + len(spec.predictions)):
        add(_loss(spec, sizes))
        add(_norm(sizes, "final norm"))
    forward, input_grad, weight_grad = (tuple(operations) for operations in by_phase.values())
    return LayerWork(forward, input_grad, weight_grad)


def _loss(spec: DecoderSpec, sizes: Sizes) -> list[tuple[str, LayerOperation]]:
    """The output layer and the loss: backward computes them, for a chunk of tokens at a time."""
    inputs, outputs = spec.output.local_features(sizes.tp)
    logits, chunks = sizes.tokens * outputs, sizes.s / sizes.chunk_length(sizes.loss_chunk)
    product = functools.partial(Gemm, count=chunks)
    rows = sizes.tokens / chunks
    linear = linear_collectives(spec.output, sizes)
    weight_grad: list[LayerOperation] = [product("head, weight gradient", outputs, inputs, rows, accumulates=True)]
    weight_grad += _rounded_grad("head", sizes, outputs * inputs * chunks)
    input_grad: list[LayerOperation] = [
        *(LayerMessage("head", call) for call in linear.forward),
        product("head", rows, outputs, inputs),
        *(LayerMessage("loss", call) for call in loss_collectives(sizes).forward),
        Traffic("loss", 10 * logits),
        Traffic("loss gradient", 6 * logits),
        product("head, input gradient", rows, inputs, outputs),
        *(LayerMessage("head", call) for call in linear.backward),
    ]
    deferred = WEIGHT_GRAD if chunks == 1 else INPUT_GRAD
    return [
        *((INPUT_GRAD, operation) for operation in input_grad),
        *((deferred, operation) for operation in weight_grad),
    ]


def embedding_work(spec: EmbeddingSpec, sizes: Sizes) -> LayerWork:
    """Returns the operations of the word embedding: a lookup, and the sum of gradients by token."""
    calls = embedding_collectives(sizes)
    rows = CHANNEL * sizes.tokens * sizes.h
    normed = 0 if spec.norm is None else rows // sizes.sp
    return LayerWork(
        (Traffic("embedding", 2 * rows + 2 * normed), *(LayerMessage("embedding", call) for call in calls.forward)),
        (Traffic("norm gradient", 3 * normed), *(LayerMessage("embedding", call) for call in calls.backward))
        if normed
        else (*(LayerMessage("embedding", call) for call in calls.backward),),
        (Traffic("embedding gradient", 3 * rows), *_rounded_grad("embedding", sizes, spec.words.numel // sizes.tp)),
    )


def _rounded_grad(name: str, sizes: Sizes, elements: float) -> list[LayerOperation]:
    """The rounding of the gradient of a weight to bf16: kernels of torch that hash the index of every element."""
    return [Traffic(f"{name}, rounded gradient", _ROUNDING * elements)] if sizes.rounds_grads else []


def _projections(spec: AttentionSpec | LatentAttentionSpec | DeltaNetSpec) -> list[tuple[str, LinearSpec]]:
    """(name, spec) of the linear layers before the core."""
    if isinstance(spec, DeltaNetSpec):
        latents = spec.latents
        further = (
            [] if latents is None else [("latent", latents.down), ("decay", latents.decay), ("gate", latents.gate)]
        )
        return [("in_proj", spec.in_proj), *further]
    if isinstance(spec, AttentionSpec):
        return [("qkv", spec.linear_qkv)]
    down = [] if spec.q_down is None else [("q down", spec.q_down)]
    return [*down, ("q up", spec.q_up), ("kv down", spec.kv_down), ("kv up", spec.kv_up)]


def _linear(
    name: str, spec: LinearSpec, sizes: Sizes, software: Software, overlap: Overlap, chunk: int | None = None
) -> list[tuple[str, LayerOperation]]:
    """chunk: tokens that are multiplied at a time, None for all."""
    inputs, outputs = spec.local_features(sizes.tp)
    rows, precision = sizes.rows if spec.parallel == REPLICATED else sizes.tokens, software.precision
    product = functools.partial(Gemm, precision=precision, count=sizes.s / sizes.chunk_length(chunk))
    chunk_rows = rows * sizes.chunk_length(chunk) / sizes.s
    forward = product(name, chunk_rows, outputs, inputs)
    input_grad = product(f"{name}, input gradient", chunk_rows, inputs, outputs)
    weight_grad = product(f"{name}, weight gradient", outputs, inputs, chunk_rows, accumulates=True)
    ops: list[tuple[str, LayerOperation]] = [(FORWARD, forward), (INPUT_GRAD, input_grad), (WEIGHT_GRAD, weight_grad)]
    rounded = inputs * outputs * sizes.s / sizes.chunk_length(chunk)
    ops += [(WEIGHT_GRAD, operation) for operation in _rounded_grad(name, sizes, rounded)]
    if precision in _CAST:
        nbytes = _CAST[precision] * CHANNEL * rows
        ops.append((FORWARD, Traffic(f"{name}, cast", nbytes * inputs, CAST)))
        ops.append((INPUT_GRAD, Traffic(f"{name}, cast", nbytes * outputs, CAST)))
    calls = linear_collectives(spec, sizes)
    column = spec.parallel == COLUMN
    for call in calls.forward:
        in_pieces = overlap.gathers if column else overlap.sums
        ops.append((FORWARD, LayerMessage(name, call, forward if in_pieces else None, sizes.tp if in_pieces else 1)))
    for place, call in enumerate(calls.backward):
        if not column:
            behind: Gemm | None = input_grad if overlap.gathers else None
            ops.append((INPUT_GRAD, LayerMessage(name, call, behind, sizes.tp if behind else 1)))
        elif place < len(calls.backward) - 1:  # the gather of the input, which the weight gradient needs
            ops.append((INPUT_GRAD, LayerMessage(name, call, input_grad if overlap.bulk_gather else None)))
        elif overlap.bulk_sum:  # where the product is that it is overlapped with
            ops.append((WEIGHT_GRAD, LayerMessage(name, call, weight_grad)))
        else:
            ops.append((INPUT_GRAD, LayerMessage(name, call)))
    return ops


def _norm(sizes: Sizes, name: str) -> list[tuple[str, LayerOperation]]:
    """A norm and the residual addition before it."""
    width = CHANNEL * sizes.rows * sizes.h
    return [
        (FORWARD, Traffic(name, 2 * width)),
        (FORWARD, Traffic("residual", 3 * width)),
        (INPUT_GRAD, Traffic(f"{name}, gradient", 3 * width)),
        (INPUT_GRAD, Traffic("residual gradient", 2 * width)),
    ]


def _delta_net(spec: DeltaNetSpec, sizes: Sizes) -> Iterator[tuple[str, LayerOperation]]:
    """Norms and gates, the convolution, and the delta rule: products of all chunks of all heads in fp32. The step from
    chunk to chunk is counted as if chunks were independent. Backward repeats the forward first."""
    core, size = spec.core, min(CHUNK, sizes.s)
    heads, tokens = core.value_heads // sizes.tp, sizes.tokens
    k, v = core.qk_dim, core.v_dim
    shapes = [(size, size, k)] * 2 + [(size, size, size // 2 or 1), (size, k, size)]
    shapes += [(size, v, size)] * 2 + [(size, v, k)] * 2 + [(k, v, size)]
    count = _SINGLE * tokens * heads / size
    channels = core.key_heads // sizes.tp * core.convolved
    for phase, times in ((FORWARD, 1), (INPUT_GRAD, 3)):
        for m, n, inner in shapes:
            yield phase, Gemm("delta rule", m, n, inner, count=count * times)
        yield phase, Traffic("delta rule", times * FP32 * tokens * heads * (10 * k + 6 * v + 6 * size))
    for phase, times in ((FORWARD, 1), (INPUT_GRAD, 2)):
        yield phase, Traffic("convolution", times * FP32 * tokens * 3 * core.taps * channels)
        calls = delta_collectives(core, sizes)
        for call in calls.forward if phase == FORWARD else calls.backward:
            yield phase, LayerMessage("delta net", call)
        # Projected channels are copied apart; queries and keys are normalized, and outputs normalized and gated.
        moved = 4 * channels + 8 * heads * v
        yield phase, Traffic("norms and gates", times * CHANNEL * tokens * moved)


def _attention(
    spec: AttentionSpec | LatentAttentionSpec, sizes: Sizes, software: Software
) -> Iterator[tuple[str, LayerOperation]]:
    core = spec.core
    heads, groups = core.heads // sizes.tp, core.local_groups(sizes.tp)
    channels = (heads + groups) * CHANNEL * sizes.tokens * core.qk_dim
    if isinstance(spec, LatentAttentionSpec):
        # Heads are put together from their parts, which are read and written; those of keys and values, too.
        copied = CHANNEL * sizes.tokens * (heads * (2 * core.qk_dim + core.v_dim))
        yield FORWARD, Traffic("heads", 2 * copied)
        yield INPUT_GRAD, Traffic("heads gradient", 2 * copied)
        channels = (heads + 1) * CHANNEL * sizes.tokens * spec.rotated
    if spec.rotary is not None or core.position_channels:
        yield FORWARD, Traffic("rotary", 2 * channels)
        yield INPUT_GRAD, Traffic("rotary gradient", 2 * channels)
    if isinstance(spec, AttentionSpec) and spec.gated:
        gated = CHANNEL * sizes.tokens * heads * core.v_dim
        yield FORWARD, Traffic("gate", 3 * gated)
        yield INPUT_GRAD, Traffic("gate gradient", 5 * gated)
    keys = sizes.s * sizes.cp
    operations = 2 * sizes.tokens * core.multiply_adds(keys) / sizes.tp
    calls = context_collectives(core, sizes)
    if software.unfused_attention:
        scores = sizes.tokens * heads * keys
        products = sizes.b * heads
        for phase, times in ((FORWARD, 1), (INPUT_GRAD, 2)):
            for _ in range(times):
                yield phase, Gemm("scores", sizes.s, keys, core.qk_dim, count=products)
                yield phase, Gemm("values", sizes.s, core.v_dim, keys, count=products)
            yield phase, Traffic("softmax", SLOW_SOFTMAX * times**0.5 * scores, SCORE)
        yield from ((FORWARD, LayerMessage("attention", call)) for call in calls.forward)
        yield from ((INPUT_GRAD, LayerMessage("attention", call)) for call in calls.backward)
        return
    forward = FusedAttention("attention", operations, keys, core.head_dim)
    backward = FusedAttention(ATTENTION_GRADIENT, 2.5 * operations, keys, core.head_dim)
    yield FORWARD, forward
    yield INPUT_GRAD, backward
    ring = sizes.comm_type in ("p2p", "a2a+p2p")
    for call in calls.forward:
        hidden = ring and call.op == "shift"
        yield FORWARD, LayerMessage("attention", call, forward if hidden else None, sizes.cp if hidden else 1)
    for call in calls.backward:  # two for each part of attention: keys and values, and their gradients
        hidden = ring and call.op == "shift"
        yield INPUT_GRAD, LayerMessage("attention", call, backward if hidden else None, 2 * sizes.cp if hidden else 1)


def _mlp(
    spec: MLPSpec | MoESpec, sizes: Sizes, software: Software, overlap: Overlap
) -> Iterator[tuple[str, list[tuple[str, LayerOperation]]]]:
    if isinstance(spec, MLPSpec):
        yield "fc1", _linear("fc1", spec.linear_fc1, sizes, software, overlap, sizes.mlp_chunk)
        width = spec.linear_fc2.local_features(sizes.tp)[0]
        yield MLP_ACT, _activation(spec.gated, sizes.tokens * width)
        yield "fc2", _linear("fc2", spec.linear_fc2, sizes, software, overlap, sizes.mlp_chunk)
        return
    assert sizes.load is not None
    chunks = sizes.s / sizes.chunk_length(sizes.mlp_chunk)
    if spec.shared is not None:
        yield from _mlp(spec.shared, sizes, software, overlap)
    ops: list[tuple[str, LayerOperation]] = []
    router, experts, load = spec.router, spec.experts, sizes.load
    ops.append((FORWARD, Gemm("router", sizes.rows, router.experts, router.hidden)))
    ops.append((INPUT_GRAD, Gemm("router, input gradient", sizes.rows, router.hidden, router.experts)))
    ops.append((WEIGHT_GRAD, Gemm("router, weight gradient", router.experts, router.hidden, sizes.rows)))
    rows, width = load.worked / load.experts / chunks, experts.width // load.etp
    for name, inputs, outputs in (
        ("experts fc1", experts.hidden, width * (2 if experts.gated else 1)),
        ("experts fc2", width, experts.hidden),
    ):
        product = functools.partial(Gemm, precision=software.precision, count=load.experts * chunks)
        ops.append((FORWARD, product(name, rows, outputs, inputs)))
        ops.append((INPUT_GRAD, product(f"{name}, input gradient", rows, inputs, outputs)))
        ops.append((WEIGHT_GRAD, product(f"{name}, weight gradient", outputs, inputs, rows, accumulates=True)))
        rounded = _rounded_grad(name, sizes, load.experts * inputs * outputs * chunks)
        ops += [(WEIGHT_GRAD, operation) for operation in rounded]
        if software.precision in _CAST:
            nbytes = _CAST[software.precision] * CHANNEL * load.worked
            ops.append((FORWARD, Traffic(f"{name}, cast", nbytes * inputs, CAST)))
            ops.append((INPUT_GRAD, Traffic(f"{name}, cast", nbytes * outputs, CAST)))
    ops += _activation(experts.gated, load.worked * width)
    # Rows are sorted by expert, and their results weighted and summed: each is read and written twice on both sides.
    moved = CHANNEL * experts.hidden * (4 * load.assigned + 4 * load.worked)
    ops.append((FORWARD, Traffic("permute", moved)))
    ops.append((INPUT_GRAD, Traffic("permute", moved)))
    calls = moe_collectives(spec, sizes)
    ops += [(FORWARD, LayerMessage("experts", call)) for call in calls.forward if call.group == "etp_ep"]
    ops += [(INPUT_GRAD, LayerMessage("experts", call)) for call in calls.backward if call.group == "etp_ep"]
    yield "moe", ops


def _activation(gated: bool, channels: float) -> list[tuple[str, LayerOperation]]:
    """channels: of its output, over all rows."""
    forward, backward = (3, 5) if gated else (2, 3)
    return [
        (FORWARD, Traffic("activation", forward * CHANNEL * channels)),
        (INPUT_GRAD, Traffic("activation gradient", backward * CHANNEL * channels)),
    ]
