"""Layers, loss and random state sharded over tp against the same with one process: outputs and every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.data import DataConfig
from megatron.core.comm.collectives import all_gather
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Positions
from megatron.core.transformer.norm import Norm
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.linear import PlainLinear
from megatron.spec.linear import COLUMN, ROW, LinearSpec
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import SEQUENCE, Init, ParamSpec, Shard
from megatron.training.batch import BatchReader
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    backward,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    place,
    slot_of,
)

S, B, IN, OUT, VOCAB = 8, 3, 16, 24, 40
SIZES = [2, 4]
LAYOUTS = [(size, sequence_parallel) for size in SIZES for sequence_parallel in (False, True)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shard(x, dim, tp):
    return x.chunk(tp.size, dim)[tp.rank]


def prepare(layer, slots):
    """Layout-independent values; with `slots`, gradients go where a buffer would put them (over whatever was there)."""
    parameters = local_parameters(layer)
    initialize(parameters, 5)
    for number, parameter in enumerate(parameters.values()):
        if parameter.info.spec.init.kind == "constant":
            noise = normal(*parameter.info.spec.shape, seed=number)
            for section in parameter.info.sections:
                section.of(parameter.detach()).add_(noise[place(section.offset, section.shape)])
        if slots:
            parameter.slot = slot_of(torch.full(parameter.shape, float("nan")))
    return parameters


def taken(parameters):
    """[(name, offset, global shape, partial?, gradient)], section by section; what autograd accumulated moves into the
    slot first."""
    found = []
    for name, parameter in parameters.items():
        if parameter.slot is not None and parameter.grad is not None:
            parameter.slot.add(parameter.grad)
        gradient = parameter.grad if parameter.slot is None else parameter.slot.main_grad
        shape = parameter.info.spec.shape
        for part in parameter.info.sections:
            found.append((name, part.offset, shape, part.partial, part.of(gradient).clone()))
    return found


def whole(ranks):
    """Name -> global gradient. Parts of a sum are added; what several ranks hold must agree."""
    tensors = {}
    for number, rank in enumerate(ranks):
        for name, offset, shape, partial, gradient in rank:
            tensor = tensors.setdefault(name, torch.full(shape, 0.0 if partial else float("nan")))
            here = place(offset, gradient.shape)
            if partial:
                tensor[here] += gradient
            else:
                known = tensor[here]
                assert number == 0 or known.isnan().all() or known.equal(gradient), f"ranks disagree on {name}"
                tensor[here] = gradient
    return tensors


def column(rank, size, sequence_parallel, slots, bias, out_shape, shard_dim):
    """(output, gradient of the input, parameters' gradients after two backward passes) of this rank."""
    groups = pool.groups(tp=size)
    tp = groups.tp
    spec = LinearSpec(IN, out_shape, COLUMN, (), has_bias=bias, init=Init("normal", 1.0), dim=shard_dim)
    layer = ColumnParallelLinear(
        spec, LinearContext(groups, sequence_parallel, PlainLinear(weight_grad.fused), torch.float32, CPU)
    )
    parameters = prepare(layer, slots)
    x = normal(S, B, IN)
    x = (shard(x, 0, tp) if sequence_parallel else x).requires_grad_()
    upstream = shard(normal(S, B, *out_shape, seed=1), 2 + shard_dim, tp).flatten(2)
    for _ in range(2):
        out = layer(x)
        out.backward(upstream)
    return out.detach(), x.grad, taken(parameters)


def row(rank, size, sequence_parallel, slots, bias, kernel):
    groups = pool.groups(tp=size)
    tp = groups.tp
    spec = LinearSpec(IN, (OUT,), ROW, (), has_bias=bias, init=Init("normal", 1.0))
    context = LinearContext(groups, sequence_parallel, PlainLinear(getattr(weight_grad, kernel)), torch.float32, CPU)
    layer = RowParallelLinear(spec, context)
    parameters = prepare(layer, slots)
    x = shard(normal(S, B, IN), 2, tp).clone().requires_grad_()
    upstream = normal(S, B, OUT, seed=1)
    for _ in range(2):
        out = layer(x)
        out.backward(shard(upstream, 0, tp) if sequence_parallel else upstream)
    return out.detach(), x.grad, taken(parameters)


def embedding(rank, size, sequence_parallel, slots):
    groups = pool.groups(tp=size)
    tp = groups.tp
    layer = VocabParallelEmbedding(
        ParamSpec((VOCAB, IN), Init("normal", 1.0), (Shard("tp", 0),)),
        groups,
        sequence_parallel=sequence_parallel,
        dtype=torch.float32,
        device=CPU,
    )
    parameters = prepare(layer, slots)
    upstream = normal(S, B, IN, seed=1)
    for _ in range(2):
        out = layer(make_ids(B, S - 1, vocab=VOCAB))
        out.backward(shard(upstream, 0, tp) if sequence_parallel else upstream)
    return out.detach(), taken(parameters)


def norm(rank, size, kind):
    """Under sequence parallelism."""
    groups = pool.groups(tp=size)
    tp = groups.tp
    spec = NormSpec(IN, kind, 1e-5, SEQUENCE)
    layer = Norm(spec, groups, sequence_parallel=True, dtype=torch.float32, device=CPU)
    parameters = prepare(layer, slots=False)
    x = shard(normal(S, B, IN), 0, tp).clone().requires_grad_()
    out = layer(x)
    out.backward(shard(normal(S, B, IN, seed=1), 0, tp))
    return out.detach(), x.grad, taken(parameters)


def cross_entropy(rank, size, vocab_size, scale):
    """(loss, gradient of the local logits)"""
    tp = pool.groups(tp=size).tp
    logits = shard(normal(S, B, VOCAB) * scale, 2, tp).clone().requires_grad_()
    targets = make_ids(S, B - 1, vocab=vocab_size)
    loss = vocab_parallel_cross_entropy(logits * 1.0, targets, vocab_size, tp)
    loss.backward(normal(S, B, seed=1))
    return loss.detach(), logits.grad


def assert_close(found, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=2e-6)


def assert_all_equal(tensors):
    for tensor in tensors[1:]:
        assert tensor.equal(tensors[0]), "ranks hold different values"


def assert_parameters(ranks, alone):
    found, expected = whole(ranks), whole(alone)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient)


@pytest.mark.parametrize(("size", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("slots", [False, True])
class TestLayers:
    """One process leaves its gradients to autograd; the others do that, or add them to slots."""

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(("out_shape", "shard_dim"), [((OUT,), 0), ((4, 6), 0), ((2, 12), 1)])
    def test_column(self, size, sequence_parallel, slots, bias, out_shape, shard_dim):
        args = (bias, out_shape, shard_dim)
        (alone,) = pool.run(1, column, False, False, *args)
        outs, grads, parameters = zip(*pool.run(size, column, sequence_parallel, slots, *args), strict=True)
        pieces = [out.unflatten(2, (*out_shape[:shard_dim], -1, *out_shape[shard_dim + 1 :])) for out in outs]
        assert_close(torch.cat(pieces, 2 + shard_dim).flatten(2), alone[0])
        if not sequence_parallel:
            assert_all_equal(grads)
        assert_close(torch.cat(grads) if sequence_parallel else grads[0], alone[1])
        assert_parameters(parameters, [alone[2]])

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("kernel", ["fused", "separate"])
    def test_row(self, size, sequence_parallel, slots, bias, kernel):
        (alone,) = pool.run(1, row, False, False, bias, kernel)
        outs, grads, parameters = zip(*pool.run(size, row, sequence_parallel, slots, bias, kernel), strict=True)
        if not sequence_parallel:
            assert_all_equal(outs)
        assert_close(torch.cat(outs) if sequence_parallel else outs[0], alone[0])
        assert_close(torch.cat(grads, 2), alone[1])
        assert_parameters(parameters, [alone[2]])

    def test_embedding(self, size, sequence_parallel, slots):
        (alone,) = pool.run(1, embedding, False, False)
        outs, parameters = zip(*pool.run(size, embedding, sequence_parallel, slots), strict=True)
        if not sequence_parallel:
            assert_all_equal(outs)
        assert (torch.cat(outs) if sequence_parallel else outs[0]).equal(alone[0]), "a look-up adds zeros: bit for bit"
        assert_parameters(parameters, [alone[1]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_on_sequence_shards(size, kind):
    (alone,) = pool.run(1, norm, kind)
    outs, grads, parameters = zip(*pool.run(size, norm, kind), strict=True)
    assert_close(torch.cat(outs), alone[0])
    assert_close(torch.cat(grads), alone[1])
    assert all(partial for rank in parameters for *_, partial, _ in rank)
    assert_parameters(parameters, [alone[2]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [VOCAB, 37, 11], ids=["full", "padded", "empty shards"])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_cross_entropy(size, vocab_size, scale):
    (alone,) = pool.run(1, cross_entropy, vocab_size, scale)
    exact = torch.nn.functional.cross_entropy(
        (normal(S, B, VOCAB) * scale)[..., :vocab_size].flatten(0, 1).double(),
        make_ids(S, B - 1, vocab=vocab_size).flatten(),
        reduction="none",
    )
    assert_close(alone[0].flatten().double(), exact)
    outs, grads = zip(*pool.run(size, cross_entropy, vocab_size, scale), strict=True)
    assert_all_equal(outs)
    assert_close(outs[0], alone[0])
    gradient = torch.cat(grads, 2)
    assert_close(gradient, alone[1])
    assert gradient[..., vocab_size:].eq(0).all()


class View(torch.autograd.Function):
    """Returns a view of a new tensor, as a linear layer does with --tp-comm-overlap."""

    @staticmethod
    def forward(ctx, x):
        return (x * 1.0).flatten(0, 1).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


def capped_cross_entropy(rank, size, apart):
    """(loss, gradient) of logits / 3, capped at 0.5: the loss divides and caps them, or that is done `apart`.

    With hooks, as under activation offload, autograd notices when a view is changed.
    """
    tp = pool.groups(tp=size).tp
    logits = shard(normal(S, B, VOCAB), 2, tp).clone().requires_grad_()
    given, options = (View.apply(logits), (3.0, 0.5)) if not apart else (0.5 * torch.tanh(logits / 3.0 / 0.5), ())
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = vocab_parallel_cross_entropy(given, make_ids(S, B - 1, vocab=37), 37, tp, *options)
    loss.backward(normal(S, B, seed=1))
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_of_capped_logits(size):
    for found, expected in zip(
        pool.run(size, capped_cross_entropy, False), pool.run(size, capped_cross_entropy, True), strict=True
    ):
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])


def cross_entropy_with_z_loss(rank, size, cap, dtype):
    tp = pool.groups(tp=size).tp
    logits = shard(normal(S, B, VOCAB) * 3, 2, tp).to(dtype).clone().requires_grad_()
    targets = make_ids(S, B - 1, vocab=37)
    loss = vocab_parallel_cross_entropy(logits * 1.0, targets, 37, tp, 2.0, cap, z_loss=0.1)
    loss.backward(normal(S, B, seed=1))
    return loss.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_with_z_loss(size, cap, dtype):
    """The loss is the plain one; the gradient is that of the sum, by autograd on whole logits."""
    whole = (normal(S, B, VOCAB) * 3).to(dtype).clone().requires_grad_()
    logits = whole[..., :37].double() / 2.0
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    targets = make_ids(S, B - 1, vocab=37)
    plain = F.cross_entropy(logits.permute(0, 2, 1), targets, reduction="none")
    (plain + 0.1 * logits.logsumexp(-1).square()).backward(normal(S, B, seed=1).double())
    found = pool.run(size, cross_entropy_with_z_loss, cap, dtype)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0][0].double(), plain.detach(), rtol=rounding, atol=rounding)
    gradient = torch.cat([part[1] for part in found], dim=2)
    torch.testing.assert_close(gradient.double(), whole.grad.double(), rtol=rounding, atol=rounding)
    assert not torch.allclose(gradient.double(), whole.grad.double() * 0.9, rtol=0.01)


def test_cross_entropy_of_strided_logits():
    tp, targets = pool.groups().tp, make_ids(S, B - 1, vocab=37)
    gradients = []
    for strided in (False, True):
        logits = normal(S, B, VOCAB).requires_grad_()
        given = (logits * 1.0).transpose(0, 1).contiguous().transpose(0, 1) if strided else logits * 1.0
        assert given.is_contiguous() is not strided
        vocab_parallel_cross_entropy(given, targets, 37, tp).sum().backward()
        gradients.append(logits.grad)
    assert gradients[0].equal(gradients[1])


def streams(rank, size):
    """Numbers drawn from each stream, and what the default stream draws around it."""
    tracker = RngTracker(7, pool.groups(tp=2), CPU)
    drawn = {name: [] for name in RngTracker.STREAMS}
    torch.manual_seed(0)
    around = [float(torch.rand(()))]
    for name in ("replicated", "sharded", "replicated"):
        with tracker.stream(name):
            drawn[name].append(torch.rand(100))
    around.append(float(torch.rand(())))
    saved = tracker.state()

    def following():
        found = []
        for name in RngTracker.STREAMS:
            with tracker.stream(name):
                found.append(torch.rand(5).tolist())
        return found

    first = following()
    unchanged = all(saved[name].dtype == torch.uint8 for name in saved) and following() != first
    tracker.load_state(saved)
    return {name: torch.cat(parts) for name, parts in drawn.items()}, around, unchanged, following() == first


def test_random_streams():
    """Ranks 0, 1 are one replica, 2, 3 the other."""
    found = pool.run(4, streams)
    numbers = [drawn for drawn, *_ in found]
    assert numbers[0]["replicated"].equal(numbers[1]["replicated"])
    assert numbers[2]["replicated"].equal(numbers[3]["replicated"])
    apart = [numbers[0]["replicated"], numbers[2]["replicated"], *(n["sharded"] for n in numbers)]
    for n, one in enumerate(apart):
        for other in apart[:n]:
            size = min(len(one), len(other))
            assert not one[:size].eq(other[:size]).any()
    assert numbers[0]["replicated"][:100].ne(numbers[0]["replicated"][100:]).all(), "a stream goes on"
    torch.manual_seed(0)
    alone = [float(torch.rand(())) for _ in range(2)]
    for _, around, unchanged, restored in found:
        assert around == alone, "the default stream does not notice"
        assert unchanged and restored


def dropout_step(rank, size, fields, sequence_parallel):
    """(losses, hidden states of the embedding, gradients of replicated parameters) of one pass with dropout."""
    groups = pool.groups(tp=size)
    model = make_model(
        {**fields, "hidden_dropout": 0.4, "attention_dropout": 0.4}, groups, sequence_parallel=sequence_parallel
    )
    data_parallel = make_data_parallel(model, groups)
    ids = make_ids(2, 16)
    hidden = model.embedding(ids[:, :-1], torch.arange(16).unsqueeze(0)).detach()
    first, second = losses(model, ids), losses(model, ids)
    assert not first.equal(second), "another mask each time"
    backward(data_parallel, (first + second).sum())
    replicated = {
        n: g for n, g in gradients(data_parallel).items() if local_parameters(model)[n].info.sections[0].holders > 1
    }
    everywhere = all_gather(hidden, groups.tp) if sequence_parallel else hidden
    return first.detach(), hidden, everywhere, replicated


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout(fields, sequence_parallel):
    """Masks of replicated activations agree over tp; those of sequence shards do not."""
    (loss, hidden, whole_hidden, grads), (loss2, hidden2, _, grads2) = pool.run(
        2, dropout_step, fields, sequence_parallel
    )
    assert loss.equal(loss2) and loss.isfinite().all()
    for name, gradient in grads.items():
        assert gradient.equal(grads2[name]) and gradient.isfinite().all(), name
    assert hidden.eq(0).float().mean() == pytest.approx(0.4, abs=0.06)
    assert whole_hidden.shape[0] == 16
    if sequence_parallel:
        share_of_equal_masks = hidden.eq(0).eq(hidden2.eq(0)).float().mean()
        assert share_of_equal_masks == pytest.approx(0.4**2 + 0.6**2, abs=0.06), "as independent masks have it"
    else:
        assert hidden.equal(hidden2)


def attention_masks(rank, size):
    """Which attention weights of this rank's heads were dropped."""
    fields = {**GPT, "attention_dropout": 0.5, "attention_backend": "unfused", "qk_layernorm": False}
    layer = make_model(fields, pool.groups(tp=size)).decoder.layers["0"].self_attention
    seen = []

    def attend(q, k, v, *, scores, segments, window, dropout):
        assert dropout == 0.5
        seen.append(torch.rand(50))
        return q.flatten(2)

    q, k, v = (torch.zeros(4, 2, 8 // size, 4) for _ in range(3))
    before = torch.get_rng_state()
    with torch.no_grad():
        layer.core = attend
        layer._attend(q, k, v, Positions((), None))
    assert torch.get_rng_state().equal(before)
    return seen[0]


def test_heads_of_different_ranks_drop_different_weights():
    one, two = pool.run(2, attention_masks)
    assert not one.eq(two).any()


def read(rank, size):
    """Tokens of each microbatch; only tp rank 0 has a loader."""
    groups = pool.groups(tp=2)
    samples = torch.arange(1000 * groups.dp.rank, 1000 * groups.dp.rank + 3 * 2 * 5).view(3, 2, 5)
    reader = BatchReader(
        iter(samples) if groups.tp.rank == 0 else None,
        DataConfig(seq_length=4, reset_attention_mask=True),
        eod=2,
        micro_batch_size=2,
        groups=groups,
        device=CPU,
    )
    with groups.heartbeat.record() as calls:
        batches = reader.read(3)
    segments = batches[0].segments
    documents = segments.ids.tolist(), segments.starts.tolist(), segments.lengths
    return [b.tokens.tolist() for b in batches], documents, [(c.op, c.group, c.shape) for c in calls]


def test_a_batch_is_the_same_on_all_tp_ranks():
    found = pool.run(4, read)
    assert found[0] == found[1] and found[2] == found[3] and found[0][0] != found[2][0]
    for replica, (tokens, _, calls) in zip((0, 0, 1, 1), found, strict=True):
        expected = torch.arange(1000 * replica, 1000 * replica + 30).view(3, 2, 5)[..., :-1]
        assert tokens == expected.tolist()
        assert calls == [("broadcast", "tp", (3, 2, 5))], "one message for all microbatches"


def half_precision(rank, size, sequence_parallel):
    """Loss per token of a bf16 model, and the gradients' norm."""
    groups = pool.groups(tp=size)
    model = make_model({**LLAMA, "bf16": True}, groups, sequence_parallel=sequence_parallel)
    data_parallel = make_data_parallel(model, groups)
    loss = losses(model, make_ids(2, 16))
    backward(data_parallel, loss.mean())
    sums = torch.stack([g.double().square().sum() for g in gradients(data_parallel).values()])
    return loss.detach(), float(sums.sum())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16(sequence_parallel):
    """Within bf16's rounding of one process."""
    (alone,) = pool.run(1, half_precision, False)
    for loss, norm_square in pool.run(2, half_precision, sequence_parallel):
        assert (loss - alone[0]).abs().max() < 0.1 and (loss - alone[0]).abs().mean() < 0.02
        assert math.isfinite(norm_square) and norm_square > 0
