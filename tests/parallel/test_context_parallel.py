"""Attention over a cut sequence against one process: outputs and gradients of every kind, and what each may be
asked."""

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.core.context_parallel import layout
from megatron.kernels.ops import attention, attention_packed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import segments_of
from tests import pool
from tests.parallel.context import CPU, SCORES, alone, error, joined, local_inputs, make, part, whole_inputs

PLAIN = {"scores": SCORES, "segments": None, "window": None, "dropout": 0.0}
# Of two samples: documents of unequal length that chunk borders cut, and some of one token.
UNEVEN = torch.bucketize(torch.arange(48), torch.tensor([5, 6, 7, 28, 47]), right=True)
SEGMENTS = segments_of(torch.stack([torch.arange(48) // 13, UNEVEN]), CPU)
OPTIONS = {
    "plain": PLAIN,
    "window 7": {**PLAIN, "window": 7},  # inside a chunk and its neighbour
    "window 21": {**PLAIN, "window": 21},
    "segments": {**PLAIN, "segments": SEGMENTS},
    "both": {**PLAIN, "segments": SEGMENTS, "window": 10},
    "capped": {**PLAIN, "scores": Scores(1.3, 1.5), "segments": SEGMENTS, "window": 10},
}
# size -> (query heads, key heads): as many, fewer, one.
HEADS = {
    2: [(4, 4), (4, 2), (4, 1)],
    3: [(6, 6), (6, 3), (6, 1)],
    4: [(8, 8), (8, 4), (8, 2), (8, 1)],
    5: [(5, 5), (10, 5), (5, 1)],
}
GRID = [(kind, size) for size in (2, 3, 4) for kind in ("p2p", "all_gather", "a2a")] + [("a2a+p2p", 4)]
TOLERANCE = 2e-6  # of the largest element, against fp64; one process in fp32 is off by 1.2e-6


def parts(rank, size, kind, all_heads, *args):
    """This rank's [out, dq, dk, dv] for each of `all_heads`."""
    return [part(rank, size, kind, heads, *args) for heads in all_heads]


def check(size, kind, all_heads, options, *, s=48, dtype=torch.float32, backend="auto", tolerance=TOLERANCE, v_dim=8):
    found = pool.run(size, parts, kind, all_heads, s, options, dtype, backend, v_dim)
    for heads, of_ranks in zip(all_heads, zip(*found, strict=True), strict=True):
        assert all(x.dtype == dtype for rank in of_ranks for x in rank)
        for a, b in zip(joined(of_ranks), alone(heads, s, options, dtype, v_dim), strict=True):
            assert error(a, b) < tolerance, (kind, heads)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("kind", "size"), GRID)
def test_as_one_process(kind, size, options):
    check(size, kind, HEADS[size], options)


@pytest.mark.parametrize("v_dim", [4, 12])
@pytest.mark.parametrize("options", ["plain", "both", "capped"])
@pytest.mark.parametrize(("kind", "size"), [("p2p", 2), ("all_gather", 2), ("a2a", 2), ("a2a+p2p", 4)])
def test_values_of_other_channels_than_keys(kind, size, options, v_dim):
    check(size, kind, HEADS[size], OPTIONS[options], v_dim=v_dim)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_five_ranks(kind):
    check(
        5, kind, HEADS[5], {**OPTIONS["both"], "segments": segments_of(torch.arange(50).expand(2, 50) // 13, CPU)}, s=50
    )


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_one_rank(kind):
    check(1, kind, HEADS[4], OPTIONS["both"])


@pytest.mark.parametrize(("kind", "size"), [("p2p", 2), ("all_gather", 2), ("a2a+p2p", 4)])
class TestKernels:
    @pytest.mark.parametrize("options", ["plain", "both", "capped"])
    def test_the_reference(self, kind, size, options):
        check(size, kind, HEADS[size], OPTIONS[options], backend="unfused")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, kind, size, dtype):
        """Merged in fp32 and rounded once; gradients of keys are rounded once more on every hop."""
        check(size, kind, HEADS[size], OPTIONS["both"], dtype=dtype, tolerance=4 * torch.finfo(dtype).eps)


def padded(rank, size, kind):
    """A sequence of 43 tokens, padded; what comes behind the last token changes nothing before it."""
    attend, cp = make(kind, size)
    results = []
    for filler in (0.0, 9.0):
        whole = [layout.pad(x, 0, size, value=filler) for x in whole_inputs(43, 4, 2)]
        whole[3][43:] = 0.0  # nothing depends on the padding
        leaves, grad = local_inputs(whole, cp)
        out = attend(*leaves, **PLAIN)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return results


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_padding(kind):
    expected = alone((4, 2), 43, PLAIN)
    for of_ranks in zip(*pool.run(4, padded, kind), strict=True):
        for a, b in zip(joined(of_ranks), expected, strict=True):
            assert a.shape[0] == 48 and error(a[:43], b) < TOLERANCE


def without_a_mask(rank, size, heads, options):
    """This rank's [out, dq, dk, dv] of 43 tokens, padded, with the kernel of a GPU, and whether it got a mask."""
    masked = []

    def whole(q, k, v, *, segments, **options):
        masked.append(segments is not None)
        return attention.fused(q, k, v, segments=segments, **options)

    attend, cp = make("a2a", size, kernel=attention_packed.packed(whole, by_flash=False))
    leaves, grad = local_inputs([layout.pad(x, 0, size) for x in whole_inputs(43, *heads)], cp)
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)], any(masked)


@pytest.mark.parametrize("window", [None, 10])
def test_documents_without_a_mask(window):
    """With all-to-all a rank has whole documents of some heads, and padding as a document of its own."""
    segments = segments_of(SEGMENTS.ids[:, :43].contiguous(), CPU)
    options = {**PLAIN, "window": window, "segments": segments.padded(layout.pad(segments.ids, 1, 4, -1))}
    found, masked = zip(*pool.run(4, without_a_mask, (8, 4), options), strict=True)
    assert not any(masked)
    expected = alone((8, 4), 43, {**options, "segments": segments})
    for a, b in zip(joined(found), expected, strict=True):
        assert a.shape[0] == 48 and error(a[:43], b) < TOLERANCE


def strided(rank, size, kind):
    """Keys and values as slices of the fused projection, a gradient of stride 0, and the gradient taken twice."""
    attend, _ = make(kind, size)
    qkv = layout.take(whole_inputs(48, 6, 6)[0].view(48, 2, 2, 3, 8), 0, rank, size).requires_grad_()

    def run():
        return attend(qkv[:, :, :, :1].flatten(2, 3), qkv[:, :, :, 1], qkv[:, :, :, 2], **PLAIN)

    loss = run().sum()
    first, second = (torch.autograd.grad(loss, qkv, retain_graph=True)[0] for _ in range(2))
    out = run()
    return first.equal(second), bool(
        (torch.autograd.grad(out, qkv, torch.ones_like(out))[0] - first).abs().max() < 1e-6
    )


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_strides_of_the_layer(kind):
    assert pool.run(2, strided, kind) == [(True, True)] * 2


def dropped(rank, size):
    """(share of weights that were kept, whether a seed repeats, whether another differs) of every visible key's
    weight."""
    attend, _ = make("a2a", size)
    s = 64
    q, v = torch.zeros(s, 1, size, s), torch.eye(s).view(s, 1, 1, s).expand(s, 1, size, s)
    q, v = (layout.take(x, 0, rank, size) for x in (q, v))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(size * seed + rank)
        results.append(attend(q, q, v, scores=SCORES, segments=None, window=None, dropout=0.25))
    return results


def test_dropout_of_a2a():
    found = pool.run(2, dropped)
    first, again, other = (layout.to_natural_order(torch.cat(x), 0, 2) for x in zip(*found, strict=True))
    assert first.equal(again) and not first.equal(other)
    weights = first.view(64, 2, 64) * torch.arange(1, 65).view(-1, 1, 1)  # 0 or 1 / 0.75 where visible
    kept = weights.transpose(0, 1)[:, torch.ones(64, 64).tril().bool()]
    assert 0.70 < kept.gt(0).float().mean() < 0.80
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.75))
    assert not kept[0].equal(kept[1]), "heads are dropped each in its own way"


def refusal(rank, size, kind, heads):
    attend, cp = make(kind, size)
    leaves, _ = local_inputs(whole_inputs(48, *heads), cp)
    with pytest.raises(ConfigError) as refused:
        attend(*leaves, **PLAIN)
    return str(refused.value)


HEADS_OF_A2A = "cannot share {} query heads and {} key/value heads (of a tensor-parallel rank) between {} ranks: {}"


@pytest.mark.parametrize(
    ("kind", "heads", "said"),
    [
        ("a2a", (6, 6), HEADS_OF_A2A.format(6, 6, 4, 4)),
        ("a2a", (12, 6), HEADS_OF_A2A.format(12, 6, 4, 4)),
        ("a2a+p2p", (3, 3), HEADS_OF_A2A.format(3, 3, 2, 2)),
    ],
)
def test_refusals(kind, heads, said):
    for message in pool.run(4, refusal, kind, heads):
        assert said in message and "; use --cp-comm-type" in message


def test_an_unknown_kind():
    with pytest.raises(ConfigError, match="--cp-comm-type broadcast is none of p2p, "):
        make("broadcast", 1)
