"""The collectives that a decoder issues, against its description and the tables of docs/sharding.md."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Positions
from megatron.spec.collectives import (
    Calls,
    embedding_collectives,
    layer_collectives,
    linear_collectives,
    loss_collectives,
)
from megatron.spec.decoder import decoder_spec
from megatron.spec.expert_rows import ExpertRows
from megatron.training.batch import make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep
from tests import pool
from tests.unit.models.builds import (
    DELTA,
    GPT,
    LATENT,
    LATENT_LITE,
    LLAMA,
    VOCAB,
    make_build,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
)
from tests.unit.spec import planned
from tests.unit.training.test_step import DATA, EOD
from tests.unit.transformer.moe.test_saved_tensors import watch

S, B, H, TP = 8, 3, 32, 2
TOKENS = (S * B,)
DOCS = Path(__file__).parents[2] / "docs" / "sharding.md"
OPS = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}


def sizes_of(config, *, tp=TP, sequence_parallel=False):
    """A microbatch of B sequences of S tokens."""
    return planned.sizes_for(config, planned.CPU, S, B, tp, sequence_parallel=sequence_parallel)


def described(calls):
    return [(call.op, call.group, call.nbytes) for call in calls]


def parts_of(config, sizes):
    """(embedding, layer, output layer and loss)"""
    spec = decoder_spec(config)
    output, loss = linear_collectives(spec.output, sizes), loss_collectives(sizes)
    head = Calls(output.forward + loss.forward, loss.backward + output.backward)
    return embedding_collectives(sizes), layer_collectives(spec.layers[0], sizes), head


def rows(calls):
    return [(c.op, c.group, c.nbytes) for c in calls]


def table_row(label):
    """[the calls that each cell of a row of docs/sharding.md lists, as (operation, elements)], the last two cells."""
    (line,) = (line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][-2:]
    found = []
    for cell in cells:
        calls = re.findall(r"(all-reduce|all-gather|reduce-scatter)(?: max)? \[([^]]+)\]", cell)
        assert calls or cell == "none", cell
        elements = {"A": S * B * H, "A/t": S * B * H // TP, "s · b": S * B, "2, s · b": 2 * S * B}
        listed = [(OPS[op], elements[size]) for op, size in calls]
        found.append(listed * 2 if "the same again" in cell else listed)
    return found


@pytest.mark.parametrize("way", ["tp", "tp + sp"])
def test_the_tables_of_the_documentation(way):
    config = make_build(LLAMA, pool.groups()).config
    sizes = sizes_of(config, sequence_parallel=way == "tp + sp")
    embedding, layer, head = parts_of(config, sizes)
    output, loss = table_row(f"output layer, {way}"), table_row("cross entropy")
    for calls, (forward, backward) in (
        (embedding, table_row(f"embedding, {way}")),
        (layer, table_row(way)),
        (head, (output[0] + loss[0], loss[1] + output[1])),
    ):
        assert [(call.op, call.nbytes // 4) for call in calls.forward] == forward
        assert [(call.op, call.nbytes // 4) for call in calls.backward] == backward


def test_the_table_of_latents():
    """Both ways of tensor parallelism, in elements: r latent channels of queries and of keys, p rotated ones."""
    config = make_build(LATENT, pool.groups()).config
    channels = {"r_q": config.q_lora_rank, "r": config.kv_lora_rank, "p": config.qk_pos_emb_head_dim}
    others = {"tp": (2, 1), "tp + sp": (3, 4)}  # calls of the output projection and of the MLP
    for way, (behind, before) in others.items():
        calls = layer_collectives(decoder_spec(config).layers[0], sizes_of(config, sequence_parallel=way == "tp + sp"))
        (line,) = (
            row for row in DOCS.read_text(encoding="utf-8").splitlines() if row.startswith(f"| latents, {way} |")
        )
        cells = line.strip("|").split("|")[1:]
        for cell, listed in zip(cells, (calls.forward[:-behind], calls.backward[before:]), strict=True):
            rows_of_cell = re.findall(r"(all-reduce|all-gather|reduce-scatter) \[s b (r_q|r|p)(/t)?\]", cell)
            stated = [(OPS[op], S * B * channels[size] // (TP if part else 1) * 4) for op, size, part in rows_of_cell]
            assert stated == [(call.op, call.nbytes) for call in listed]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_table_of_heads_that_are_normed_together(sequence_parallel):
    alone, together = (
        layer_collectives(decoder_spec(config).layers[0], sizes_of(config, sequence_parallel=sequence_parallel))
        for config in (make_build(fields, pool.groups()).config for fields in (LLAMA, TOGETHER))
    )
    forward, backward = table_row("`--qk-layernorm-across-heads`, t > 1, more")
    for more, without, expected in (
        (together.forward, alone.forward, forward),
        (together.backward, alone.backward, backward),
    ):
        assert [(call.op, call.nbytes // 4) for call in (Counter(more) - Counter(without)).elements()] == expected


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
    return record(groups, layer, x, Positions((), None))


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


TOGETHER = {**LLAMA, "qk_layernorm": True, "qk_layernorm_across_heads": True}
MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "bf16": {**LLAMA, "bf16": True},
    "parallel": {**GPT, "parallel_residual": True},
    "one norm": {**GPT, "parallel_residual": True, "shared_norm": True},
    "norms behind": {**GPT, "pre_norm": False, "post_norm": True},
    "heads normed together": TOGETHER,
    "delta nets": DELTA,
    "latents": LATENT,
    "latents, queries without": LATENT_LITE,
    "decays of channels": {**DELTA, "experimental_attention_variant": "kda"},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("part", "measure"), enumerate([embedding_calls, layer_calls, head_calls]))
def test_part(part, measure, sequence_parallel, model):
    config = make_build(MODELS[model], pool.groups()).config
    calls = parts_of(config, sizes_of(config, sequence_parallel=sequence_parallel))[part]
    for found in pool.run(TP, measure, MODELS[model], sequence_parallel):
        assert found == (described(calls.forward), described(calls.backward))


@pytest.mark.parametrize("measure", [layer_calls, embedding_calls, head_calls])
def test_one_process_communicates_nothing(measure):
    assert pool.run(1, measure, LLAMA, True) == [([], [])]


EXPERTS = {**LLAMA, "num_experts": 8, "moe_router_topk": 3, "moe_shared_expert_intermediate_size": 16}


def expert_calls(rank, size, axes):
    """(calls of a layer with experts, those of its description under the same routing)"""
    groups = pool.groups(**axes, experts=True)
    build = make_build(EXPERTS, groups, sequence_parallel=True)
    layer, tp = TransformerLayer(build, 0), groups.tp.size
    initialize(local_parameters(layer), 1)
    dispatched = watch(layer.mlp._dispatcher)
    x = torch.randn(S // tp, B, H, requires_grad=True)
    found = record(groups, layer, x, Positions((), None))
    (sent,) = dispatched
    load = ExpertRows(
        ranks=groups.etp_ep.size,
        etp=groups.etp.size,
        experts=len(sent.assignments.sizes),
        sent=sum(sent.plan.send_rows) if size > 1 else 0,
        assigned=len(x.flatten(0, 1)) * 3,
        received=len(sent.rows),
        worked=len(sent.weights),
        largest=max(sent.assignments.sizes),
    )
    sizes = sizes_of(build.config, tp=tp, sequence_parallel=tp > 1)
    calls = layer_collectives(build.spec.layers[0], dataclasses.replace(sizes, load=load))
    return found, (described(calls.forward), described(calls.backward))


@pytest.mark.parametrize(
    ("size", "axes"),
    [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"tp": 2, "ep": 2, "etp": 1}), (4, {"tp": 2, "ep": 2})],
)
def test_a_layer_with_experts(size, axes):
    for found, expected in pool.run(size, expert_calls, axes):
        assert found == expected


CONTEXTS = [("p2p", 2), ("p2p", 3), ("all_gather", 2), ("all_gather", 3), ("a2a", 2), ("a2a", 4), ("a2a+p2p", 4)]


def context_sizes(config, kind, cp, tp=1):
    """A rank has two tokens of each sequence."""
    sizes = planned.sizes_for(config, planned.CPU, 2, B, tp, sequence_parallel=tp > 1)
    return dataclasses.replace(sizes, cp=cp, comm_type=kind, cp_inner=2)


def context_calls(rank, size, kind, tp, fields):
    """(calls of a layer's forward, of its backward)"""
    groups = pool.groups(tp=tp, cp=size // tp, inner=2 if kind == "a2a+p2p" else 1)
    build = make_build(fields, groups, sequence_parallel=True, cp_comm_types=(kind,))
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 1)
    x = torch.ones(2 // tp, B, H, dtype=build.dtype, requires_grad=True)
    return record(groups, layer, x, Positions((), None))


@pytest.mark.parametrize(("kind", "cp"), CONTEXTS)
@pytest.mark.parametrize("model", ["llama", "bf16", "delta nets", "decays of channels"])
def test_context(kind, cp, model):
    config = make_build(MODELS[model], pool.groups()).config
    calls = layer_collectives(decoder_spec(config).layers[0], context_sizes(config, kind, cp))
    for found in pool.run(cp, context_calls, kind, 1, MODELS[model]):
        assert found == (described(calls.forward), described(calls.backward))


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("fields", [LLAMA, TOGETHER, LATENT], ids=["llama", "heads normed together", "latents"])
def test_context_and_tensor_parallelism(kind, fields):
    config = make_build(fields, pool.groups()).config
    calls = layer_collectives(decoder_spec(config).layers[0], context_sizes(config, kind, 2, tp=2))
    for found in pool.run(4, context_calls, kind, 2, fields):
        assert found == (described(calls.forward), described(calls.backward))


def step_calls(rank, size, sequence_parallel):
    """One optimizer step of two microbatches under TP 2 x DP 2, and what its shapes follow from."""
    groups = pool.groups(tp=2)
    model = make_model(GPT, groups, sequence_parallel=sequence_parallel)
    data_parallel = make_data_parallel(model, groups)
    optimizer = make_optimizer(data_parallel, groups)
    step = TrainStep(model, data_parallel, optimizer, groups, Timers(0, lambda: None), per_token=True, count_zeros=True)
    batches = [make_batch(make_ids(B, S, seed=n), EOD, DATA) for n in range(2)]
    with groups.heartbeat.record() as calls:
        step.forward_backward(batches)
        step.update(1e-3, 0.0)
    partial = [p.numel() for p in local_parameters(model).values() if p.info.sections[0].partial]
    return rows(calls), partial, [bucket.size for bucket in data_parallel.buckets]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_step(sequence_parallel):
    layers = GPT["num_layers"]
    config = make_build(GPT, pool.groups()).config
    embedding, layer, head = parts_of(config, sizes_of(config, sequence_parallel=sequence_parallel))
    parts = [embedding, *[layer] * layers, head]
    microbatch = [call for part in parts for call in described(part.forward)]
    microbatch += [call for part in reversed(parts) for call in described(part.backward)]
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
            ("all_reduce", "dp", 8),  # unmasked tokens of the global batch
            *microbatch * 2,
            *[("all_reduce", "replicas", 4 * n) for n in buckets],
            ("all_reduce", "dp_cp", 32),  # the loss, that of all labels, their number, parameters without a gradient
            ("all_reduce", "tp", 4 * on_wire),
            ("all_reduce", "world", 8),  # the gradient's norm
            ("all_reduce", "world", 8),  # zeros in it
        ]
