"""Which collectives a decoder issues, as the tables of docs/sharding.md list them: operation, group, shape, bytes."""

import pytest
import torch

from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Positions
from megatron.training.batch import make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep
from tests import pool
from tests.unit.models.builds import (
    GPT,
    LLAMA,
    VOCAB,
    make_build,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
)
from tests.unit.training.test_step import DATA, EOD

S, B, H, TP, PADDED = 8, 3, 32, 2, 112
WHOLE, SHARD = (S, B, H), (S // TP, B, H)  # hidden states of all positions, and of a rank's own
TOKENS = (S * B,)

# (operation, shape of what goes in) on group tp, in order. One layer: attention, then MLP; backward the other way round.
LAYER = {
    False: {
        "forward": [("all_reduce", WHOLE), ("all_reduce", WHOLE)],  # after linear_proj, after linear_fc2
        "backward": [("all_reduce", WHOLE), ("all_reduce", WHOLE)],  # input gradient of linear_fc1, of linear_qkv
    },
    True: {
        "forward": [
            ("all_gather", SHARD),  # input of linear_qkv
            ("reduce_scatter", WHOLE),  # output of linear_proj
            ("all_gather", SHARD),  # input of linear_fc1
            ("reduce_scatter", WHOLE),  # output of linear_fc2
        ],
        "backward": [
            ("all_gather", SHARD),  # gradient of linear_fc2's output
            ("all_gather", SHARD),  # linear_fc1's input once more: it is not kept whole
            ("reduce_scatter", WHOLE),  # its gradient
            ("all_gather", SHARD),  # gradient of linear_proj's output
            ("all_gather", SHARD),  # linear_qkv's input once more
            ("reduce_scatter", WHOLE),  # its gradient
        ],
    },
}
EMBEDDING = {
    False: {"forward": [("all_reduce", WHOLE)], "backward": []},
    True: {"forward": [("reduce_scatter", WHOLE)], "backward": [("all_gather", SHARD)]},
}
HEAD_AND_LOSS = {
    False: {
        "forward": [("all_reduce", TOKENS), ("all_reduce", (2, *TOKENS))],  # largest logit; sum of exp, target's logit
        "backward": [("all_reduce", WHOLE)],  # gradient of the head's input
    },
    True: {
        "forward": [("all_gather", SHARD), ("all_reduce", TOKENS), ("all_reduce", (2, *TOKENS))],
        "backward": [("all_gather", SHARD), ("reduce_scatter", WHOLE)],
    },
}


def nbytes(shape, itemsize):
    return torch.Size(shape).numel() * itemsize


def rows(calls):
    return [(c.op, c.group, c.shape, c.nbytes) for c in calls]


def expected_rows(table, itemsize=4):
    """Logits' statistics are fp32 whatever the activations are."""
    return [(op, "tp", shape, nbytes(shape, 4 if shape in (TOKENS, (2, *TOKENS)) else itemsize)) for op, shape in table]


def record(groups, forward, *inputs):
    """(calls of the forward, calls of the backward)"""
    with groups.heartbeat.record() as first:
        out = forward(*inputs)
    with groups.heartbeat.record() as second:
        out.backward(torch.ones_like(out))
    return rows(first), rows(second)


def layer_calls(rank, size, fields, sequence_parallel):
    groups = pool.groups(tp=size)
    build = make_build(fields, groups, sequence_parallel=sequence_parallel)
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 1)
    x = torch.ones(S // size if sequence_parallel else S, B, H, dtype=build.dtype, requires_grad=True)
    return record(groups, layer, x, Positions(None, None))


def embedding_calls(rank, size, fields, sequence_parallel):
    groups = pool.groups(tp=size)
    model = make_model(fields, groups, sequence_parallel=sequence_parallel)
    return record(groups, model.embedding, make_ids(B, S)[:, :-1], torch.arange(S).unsqueeze(0))


def head_calls(rank, size, fields, sequence_parallel):
    groups = pool.groups(tp=size)
    model = make_model(fields, groups, sequence_parallel=sequence_parallel)
    dtype = model.output_layer.weight.dtype
    x = torch.ones(S // size if sequence_parallel else S, B, H, dtype=dtype, requires_grad=True)
    labels = make_ids(S, B - 1)

    def forward(x):
        return vocab_parallel_cross_entropy(model.output_layer(x), labels, VOCAB, groups.tp)

    return record(groups, forward, x)


MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "bf16": {**LLAMA, "bf16": True},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("measure", "table"), [(layer_calls, LAYER), (embedding_calls, EMBEDDING), (head_calls, HEAD_AND_LOSS)]
)
def test_part(measure, table, sequence_parallel, model):
    itemsize = 2 if model == "bf16" else 4
    expected = tuple(expected_rows(table[sequence_parallel][p], itemsize) for p in ("forward", "backward"))
    for found in pool.run(TP, measure, MODELS[model], sequence_parallel):
        assert found == expected


@pytest.mark.parametrize("measure", [layer_calls, embedding_calls, head_calls])
def test_one_process_communicates_nothing(measure):
    assert pool.run(1, measure, LLAMA, True) == [([], [])]


D, QUERIES, KEYS = 4, 8, 4  # LLAMA's heads
CONTEXTS = [("p2p", 2), ("p2p", 3), ("all_gather", 2), ("all_gather", 3), ("a2a", 2), ("a2a", 4), ("a2a+p2p", 4)]


def context_table(kind, tp, cp):
    """(operation, group, elements of the input) of attention over cp: forward, backward."""
    inner = {"a2a": cp, "a2a+p2p": 2}.get(kind, 1)
    tokens = 2 * B * D  # of a rank: sequences are 2 x cp
    queries, keys = tokens * QUERIES // tp, 2 * tokens * max(KEYS // tp, inner)
    ring = [("shift", "cp_outer" if inner > 1 else "cp", keys)] * (cp // inner - 1)
    if kind == "all_gather":
        gather = ("all_gather", "cp", keys)
        return [gather], [gather, ("reduce_scatter", "cp", cp * keys)]
    if kind == "p2p":
        return ring, ring * 2
    group = "cp" if kind == "a2a" else "cp_inner"
    to_heads, back = ("all_to_all", group, queries + keys), ("all_to_all", group, queries)
    return [to_heads, *ring, back], [back, *ring * 2, to_heads]


def context_calls(rank, size, kind, tp, fields):
    """Of a layer, those over cp and those over tp."""
    groups = pool.groups(tp=tp, cp=size // tp, inner=2 if kind == "a2a+p2p" else 1)
    build = make_build(fields, groups, sequence_parallel=True, cp_comm_types=(kind,))
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 1)
    x = torch.ones(2 // tp, B, H, dtype=build.dtype, requires_grad=True)
    calls = record(groups, layer, x, Positions(None, None))
    elements = [[(op, group, n // build.dtype.itemsize) for op, group, _, n in part] for part in calls]
    return [[[c for c in part if (c[1] == "tp") == over_tp] for part in elements] for over_tp in (False, True)]


@pytest.mark.parametrize(("kind", "cp"), CONTEXTS)
@pytest.mark.parametrize("model", ["llama", "bf16"])
def test_context(kind, cp, model):
    for over_cp, over_tp in pool.run(cp, context_calls, kind, 1, MODELS[model]):
        assert tuple(over_cp) == context_table(kind, 1, cp) and over_tp == [[], []]


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_context_beside_tensor_parallelism(kind):
    """Attention sends its own heads; the linears' collectives are those of a sequence of s / cp."""
    whole, shard = 2 * B * H, B * H
    sizes = {"all_gather": shard, "reduce_scatter": whole}
    expected = [[(op, "tp", sizes[op]) for op, _ in LAYER[True][part]] for part in ("forward", "backward")]
    for over_cp, over_tp in pool.run(4, context_calls, kind, 2, LLAMA):
        assert tuple(over_cp) == context_table(kind, 2, 2) and over_tp == expected


def step_calls(rank, size, sequence_parallel):
    """One optimizer step of two microbatches under TP 2 x DP 2, and what its shapes follow from."""
    groups = pool.groups(tp=2)
    model = make_model(GPT, groups, sequence_parallel=sequence_parallel)
    data_parallel = make_data_parallel(model, groups)
    optimizer = make_optimizer(data_parallel, groups)
    step = TrainStep(model, data_parallel, optimizer, groups, Timers(0, lambda: None), per_token=True, count_zeros=True)
    batches = [make_batch(make_ids(B, S, seed=n), EOD, DATA) for n in range(2)]
    with groups.heartbeat.record() as calls:
        step(batches, 1e-3, 0.0)
    partial = [p.numel() for p in local_parameters(model).values() if p.info.sections[0].partial]
    return rows(calls), partial, [bucket.size for bucket in data_parallel.buckets]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_step(sequence_parallel):
    layers = GPT["num_layers"]
    parts = [EMBEDDING, *[LAYER] * layers, HEAD_AND_LOSS]
    microbatch = [call for part in parts for call in part[sequence_parallel]["forward"]]
    microbatch += [call for part in reversed(parts) for call in part[sequence_parallel]["backward"]]
    for calls, partial, buckets in pool.run(4, step_calls, sequence_parallel):
        # Gradients that each tp rank has a part of: query and key norms; with sequence shards all norms, the biases
        # after row-parallel layers and the position table, too.
        sizes = layers * 4 * [4]
        if sequence_parallel:
            sizes += layers * (4 + 2) * [H] + 2 * [H] + [64 * H]
        assert sorted(partial) == sorted(sizes) and len(buckets) > 3
        # A parameter takes whole rows of 64 elements in its bucket.
        on_wire = sum(-(-n // 64) * 64 for n in sizes)
        assert calls == [
            ("all_reduce", "dp", (), 8),  # unmasked tokens of the global batch
            *expected_rows(microbatch * 2),
            *[("all_reduce", "replicas", (n,), 4 * n) for n in buckets],
            ("all_reduce", "dp_cp", (2,), 16),  # the loss, and parameters without a gradient
            ("all_reduce", "tp", (on_wire,), 4 * on_wire),
            ("all_reduce", "model", (1,), 8),  # the gradient's norm
            ("all_reduce", "model", (1,), 8),  # zeros in it
        ]
