"""Overlap of tensor-parallel communication with products, against the same layers without it."""

import dataclasses
import itertools

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.core.comm import transport
from megatron.core.comm.chunks import ChunkComm, halves
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel import overlap
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from megatron.core.tensor_parallel.overlap import PLAIN, Fused, InChunks, Plain, choose_overlap
from megatron.core.timeline import Timeline
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.ops import gemm, weight_grad
from megatron.kernels.ops.linear import PlainLinear
from megatron.spec.linear import COLUMN, ROW, LinearSpec
from megatron.spec.parameter import Init
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    assert_gradients,
    backward,
    gradients,
    losses,
    make_build,
    make_data_parallel,
    make_ids,
    slot_of,
    spread_constants,
)

# Rows of a rank's block: 30, 20 and 15 for tp 2, 3 and 4; most cannot be halved twice.
S, B, IN, OUT = 12, 5, 24, 48
SIZES = [2, 3, 4]
ALL_OFF = {"tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False}
BULK_OFF = {"tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_chunks(tp, *, least_rows=4, timeline=None, **switches):
    comm = ChunkComm(tp, Streams(CPU, timeline or Timeline(CPU)))
    return InChunks(ParallelConfig(**switches), comm, "in chunks", least_rows)


def layer_of(kind, tp, sequence_parallel, how, dtype=torch.float32, frozen=False):
    kernel = weight_grad.fused if dtype == torch.float32 else weight_grad.fused_upcast
    context = LinearContext(pool.groups(tp=tp.size), sequence_parallel, PlainLinear(kernel), dtype, CPU, how)
    init = Init("normal", 1.0)
    if kind == "column":
        spec = LinearSpec(IN, (2, OUT // 2), COLUMN, (), has_bias=True, init=init, dim=1)
        layer = ColumnParallelLinear(spec, context)
    else:
        layer = RowParallelLinear(LinearSpec(IN, (OUT,), ROW, (), has_bias=True, init=init), context)
    parameters = local_parameters(layer)
    initialize(parameters, 5)
    spread_constants(parameters, 1.0)
    for parameter in parameters.values():
        parameter.slot = slot_of(torch.full(parameter.shape, float("nan")))
    layer.weight.requires_grad_(not frozen)
    return layer


def inputs_of(kind, tp, sequence_parallel, dtype=torch.float32):
    """(input, gradient of the output) of this rank."""
    whole_in, whole_out = sequence_parallel and kind == "column", sequence_parallel and kind == "row"
    x = normal(S // tp.size if whole_in else S, B, IN if kind == "column" else IN // tp.size, seed=tp.rank, dtype=dtype)
    upstream = normal(
        S // tp.size if whole_out else S, B, OUT // tp.size if kind == "column" else OUT, seed=9 + tp.rank, dtype=dtype
    )
    if not sequence_parallel:  # what is replicated is the same on all ranks
        x = normal(*x.shape, seed=7, dtype=dtype) if kind == "column" else x
        upstream = normal(*upstream.shape, seed=8, dtype=dtype) if kind == "row" else upstream
    return x, upstream


def passes(layer, x, upstream):
    """Output, input gradient and gradients of the parameters after two passes."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        out = layer(x)
        out.backward(upstream)
    for parameter in layer.parameters():
        if parameter.grad is not None:  # a row layer's bias
            parameter.slot.add(parameter.grad)
    found = {"out": out.detach(), "input": x.grad}
    return found | {name: p.slot.main_grad for name, p in layer.named_parameters() if p.requires_grad}


def difference(found, expected):
    """Name -> largest difference, relative to the largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        assert tensor.isfinite().all(), name
    return {
        name: float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max())
        for name, tensor in expected.items()
    }


def layer_differences(rank, size, kind, sequence_parallel, dtype):
    tp = pool.groups(tp=size).tp
    x, upstream = inputs_of(kind, tp, sequence_parallel, dtype)
    plain = passes(layer_of(kind, tp, sequence_parallel, PLAIN, dtype), x, upstream)
    found = []
    for least_rows, switches in [(1, {}), (4, {}), (7, BULK_OFF), (1000, {}), (4, ALL_OFF)]:
        how = in_chunks(tp, least_rows=least_rows, **switches)
        found.append(difference(passes(layer_of(kind, tp, sequence_parallel, how, dtype), x, upstream), plain))
    return found


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(size, sequence_parallel, kind, dtype):
    """The same numbers: sums are of the same terms. gloo adds the ranks' half-precision terms of an all-reduce in an
    order that depends on where a row lies, and rounds each time."""
    rounded = dtype == torch.bfloat16 and not sequence_parallel and size > 2
    for rank in pool.run(size, layer_differences, kind, sequence_parallel, dtype):
        for case in rank:
            assert max(case.values()) <= (2**-6 if rounded else 1e-6), case


def frozen(rank, size, kind):
    """With a frozen weight: differences, and what a backward communicates."""
    tp = pool.groups(tp=size).tp
    x, upstream = inputs_of(kind, tp, True)
    plain = passes(layer_of(kind, tp, True, PLAIN, frozen=True), x, upstream)
    layer = layer_of(kind, tp, True, in_chunks(tp), frozen=True)
    found = difference(passes(layer, x, upstream), plain)
    out = layer(x.clone().requires_grad_())
    with tp.heartbeat.record() as calls:
        out.backward(upstream)
    return found, {call.op for call in calls}


@pytest.mark.parametrize(("kind", "ops"), [("column", {"reduce_scatter"}), ("row", {"all_gather"})])
def test_a_frozen_weight_needs_no_input(kind, ops):
    for found, called in pool.run(2, frozen, kind):
        assert "weight" not in found and max(found.values()) <= 1e-6
        assert called == ops


def recorded(rank, size, kind, sequence_parallel):
    """[plain, in chunks] x [forward, backward]: what the recorder sees; the number and bytes of messages of chunks."""
    tp = pool.groups(tp=size).tp
    x, upstream = inputs_of(kind, tp, sequence_parallel)
    sent, send = [], transport.send

    def counted(group, outgoing, *args):
        sent.append(outgoing.nbytes)
        return send(group, outgoing, *args)

    found = []
    transport.send = counted
    try:
        for how in (PLAIN, in_chunks(tp)):
            layer = layer_of(kind, tp, sequence_parallel, how)
            with tp.heartbeat.record() as forward:
                out = layer(x.requires_grad_())
            with tp.heartbeat.record() as behind:
                out.backward(upstream)
            found.append([[(c.op, c.shape[-1], c.nbytes) for c in calls] for calls in (forward, behind)])
    finally:
        transport.send = send
    return found, len(sent), sum(sent)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_as_many_bytes(size, sequence_parallel, kind):
    """docs/sharding.md's volumes hold with chunks, too; what is really sent is (tp - 1) / tp of the whole tensor."""
    for (plain, cut), messages, sent in pool.run(size, recorded, kind, sequence_parallel):
        if sequence_parallel:
            assert cut == plain and messages > size - 1
            # Cut are a column's all-gather, and a row's reduce-scatter and all-gather.
            block = S * B // size * 4 * (IN if kind == "column" else OUT)
            assert sent == (size - 1) * block * (1 if kind == "column" else 2)
        else:
            (whole,) = itertools.chain(*plain)
            calls = list(itertools.chain(*cut))
            assert len(calls) == 8 and messages == 0
            assert {call[:2] for call in calls} == {whole[:2]} and sum(call[2] for call in calls) == whole[2]


def order(rank, size, kind, direction):
    """What happens in a pass: "send" for a message of a piece, the number of rows of a product."""
    tp = pool.groups(tp=size).tp
    x, upstream = inputs_of(kind, tp, True)
    events, send, row_gemm = [], transport.send, gemm.RowGemm

    def noted(group, outgoing, *args):
        events.append("send")
        return send(group, outgoing, *args)

    class Noted(row_gemm):
        def __call__(self, x, out):
            events.append(len(x))
            super().__call__(x, out)

    transport.send, gemm.RowGemm = noted, Noted
    try:
        out = layer_of(kind, tp, True, in_chunks(tp, least_rows=7))(x.requires_grad_())
        if direction == "backward":
            events.clear()
            out.backward(upstream)
    finally:
        transport.send, gemm.RowGemm = send, row_gemm
    return events


def test_chunks_are_in_flight_while_gemms_run():
    """A gather begins with its own rows and posts chunks before the GEMMs; a scatter posts each chunk before the
    next product, and ends with its own rows."""
    gather = ["send"] * 3 + [30, 15, 8, 7]
    assert pool.run(2, order, "column", "forward") == [gather] * 2
    assert pool.run(2, order, "row", "backward") == [gather] * 2
    assert pool.run(2, order, "row", "forward") == [[7, "send", 8, "send", 15, "send", 30]] * 2
    # Blocks of 15 rows. The next rank's are posted when the first of this one's have come.
    gather = ["send"] * 2 + [15] + ["send"] * 2 + [8, 7] + ["send"] * 2 + [8, 7, 8, 7]
    assert pool.run(4, order, "column", "forward") == [gather] * 4
    assert pool.run(4, order, "row", "forward") == [[7, "send", 8, "send"] * 3 + [15]] * 4


def lagging(rank, size):
    """Rank 0 stands still in mid-pass: the others' rows still come to it, and the sums are right."""
    tp = pool.groups(tp=size).tp
    comm, x = ChunkComm(tp, Streams(CPU, Timeline(CPU))), normal(20 * size, 3, seed=tp.rank)
    shard, leaving = comm.scatter(20 * size, 3, x, 4)
    for number, (rows, out) in enumerate(leaving):
        if rank == 0 and number == 1:
            torch.mm(torch.ones(600, 600), torch.ones(600, 600))
        out.copy_(x[rows])
    full, arriving = comm.gather(shard, 3)
    seen = torch.zeros(20 * size)
    for rows in arriving:
        seen[rows] += 1
    return full, bool(seen.eq(1).all())


@pytest.mark.parametrize("size", SIZES)
def test_every_row_once_and_sums_in_rank_order(size):
    total = normal(20 * size, 3, seed=0)
    for rank in range(1, size):
        total = total + normal(20 * size, 3, seed=rank)
    for full, once in pool.run(size, lagging):
        assert once and full.equal(total)


def timed(rank, size):
    tp = pool.groups(tp=size).tp
    timeline = Timeline(CPU)
    how = in_chunks(tp, least_rows=7, timeline=timeline)
    layers = [layer_of(kind, tp, True, how) for kind in ("column", "row")]
    x, _ = inputs_of("column", tp, True)
    y, _ = inputs_of("row", tp, True)
    silent = layers[0](x)
    timeline.start()
    out, _ = layers[0](x), layers[1](y)
    spans = timeline.stop()
    assert out.equal(silent)
    return [(span.row, span.name, span.stop >= span.start) for span in spans]


def test_timeline():
    expected = {("tp", f"{op}, step 1", True) for op in ("all-gather", "reduce-scatter")}
    for spans in pool.run(2, timed):
        assert set(spans) == expected and len(spans) == 6


def model_step(rank, size, fields, sequence_parallel, cut):
    """(losses, gradients) of one microbatch."""
    groups = pool.groups(tp=size)
    build = make_build(fields, groups, sequence_parallel=sequence_parallel)
    how = in_chunks(groups.tp, least_rows=3) if cut else PLAIN
    model = GPTModel(dataclasses.replace(build, overlap=how))
    initialize(local_parameters(model), 3)
    spread_constants(local_parameters(model), 0.3)
    if "lora_rank" in fields:
        freeze_all_but_adapters(local_parameters(model))
    data_parallel = make_data_parallel(model, groups)
    sent, send = [], transport.send
    with groups.heartbeat.record() as calls:
        transport.send = lambda *args: sent.append(None) or send(*args)
        try:
            loss = losses(model, make_ids(2, 16))
            backward(data_parallel, loss.mean())
        finally:
            transport.send = send
    return loss.detach(), gradients(data_parallel), len(calls) + len(sent)


MODELS = {"llama": LLAMA, "gpt": GPT, "lora": {**LLAMA, "lora_rank": 3}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_whole_model(size, sequence_parallel, name):
    args = MODELS[name], sequence_parallel
    for plain, cut in zip(pool.run(size, model_step, *args, False), pool.run(size, model_step, *args, True)):
        torch.testing.assert_close(cut[0], plain[0], rtol=1e-6, atol=1e-6)
        assert_gradients(cut[1], plain[1])
        assert cut[2] > plain[2], "something was cut"


def fused_differences(rank, size, kind):
    """Fused on the CPU: torch's operations have no CPU kernel, so they are given one, unfused."""
    groups = pool.groups(tp=size)
    tp, names = groups.tp, []

    def gather(shard, matrices, dim, name, *, return_A=True):
        assert dim == 0
        names.append(name)
        full = overlap.all_gather(shard, tp)
        return full if return_A else None, [full @ matrix for matrix in matrices]

    def scatter(x, matrix, op, dim, name):
        assert (op, dim) == ("sum", 0)
        names.append(name)
        return overlap.reduce_scatter(x @ matrix, tp)

    x, upstream = inputs_of(kind, tp, True)
    plain = passes(layer_of(kind, tp, True, PLAIN), x, upstream)
    how = Fused(ParallelConfig(), ChunkComm(tp, Streams(CPU, Timeline(CPU))), "fused", 4)
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_matmul", gather, "CPU")
        library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
        found = passes(layer_of(kind, tp, True, how), x, upstream)
    return difference(found, plain), set(names) == {tp.process_group.group_name}, len(names)


@pytest.mark.parametrize(("kind", "fused"), [("column", 2), ("row", 4)])
def test_fused_operations(kind, fused):
    """Two passes: a column's forward, a row's forward and backward."""
    for found, right_group, count in pool.run(2, fused_differences, kind):
        assert max(found.values()) <= 1e-6 and right_group and count == fused


def chosen(rank, size, parallel):
    tp = pool.groups(tp=size).tp
    how, why = choose_overlap(ParallelConfig(**parallel), tp, "gloo", Streams(CPU, Timeline(CPU)))
    return type(how), how.name, why


@pytest.mark.parametrize(
    ("size", "parallel", "expected"),
    [
        (1, {}, (Plain, "off", "")),
        (1, {"tp_comm_overlap": True}, (Plain, "off", "tp = 1")),
        (2, {}, (Plain, "off", "")),
        (
            2,
            {"tp_comm_overlap": True},
            (InChunks, "in chunks, gloo", "no symmetric memory: it needs --sequence-parallel"),
        ),
        (
            2,
            {"tp_comm_overlap": True, "sequence_parallel": True},
            (InChunks, "in chunks, gloo", "no symmetric memory: no CUDA device"),
        ),
    ],
)
def test_choice(size, parallel, expected):
    assert pool.run(size, chosen, parallel) == [expected] * size


def test_gloo_does_not_send_from_a_gpu():
    tp = dataclasses.replace(pool.groups().tp, ranks=(0, 1))
    streams = Streams(torch.device("cuda"), Timeline(torch.device("cuda")))
    how, why = choose_overlap(ParallelConfig(tp_comm_overlap=True), tp, "gloo", streams)
    assert type(how) is Plain and why == "gloo sends no chunks from GPU memory"


@pytest.mark.parametrize(
    ("n", "least", "times", "sizes"),
    [
        (512, 64, 3, [256, 128, 64, 64]),
        (512, 1, 3, [256, 128, 64, 64]),
        (512, 100, 3, [256, 128, 128]),
        (512, 64, 1, [256, 256]),
        (30, 7, 3, [15, 8, 7]),
        (7, 4, 3, [7]),
        (0, 4, 3, [0]),
    ],
)
def test_sizes(n, least, times, sizes):
    assert halves(n, least, times) == sizes and sum(sizes) == n
