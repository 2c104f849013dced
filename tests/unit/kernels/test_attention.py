"""Attention kernels against a loop over queries, and what `choose` picks."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.backends import flash
from megatron.kernels.ops import attention, attention_lse, attention_rows
from megatron.kernels.ops.attention_packed import packed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, segments_of
from megatron.kernels.ops.batch_invariant import attention as invariant
from megatron.kernels.ops.batch_invariant.attention import in_key_blocks
from tests.unit.kernels.close import assert_same, outputs_and_gradients, random

KERNELS = {
    "unfused": attention.unfused,
    "fused": attention.fused,
    "rows": attention_rows.attention,
    "block": attention_rows.of_blocks(attention_lse.with_dropout(attention_lse.cpu)),
}
SCORES, CAPPED = Scores(8**-0.5), Scores(1.3, 1.5)
CPU = torch.device("cpu")
PLAIN = {"scores": SCORES, "segments": None, "window": None, "dropout": 0.0}
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2]])


def slow(q, k, v, segments=None, window=None, scores=SCORES, sinks=None):
    """One query at a time, keys picked by the rule in words. A sink is a score whose value is zero."""
    s, b, n, d = q.shape
    t, per_group = k.shape[0], n // k.shape[2]
    rows = []
    for i in range(s):
        place = i + t - s
        for sample in range(b):
            seen = [j for j in range(place + 1) if segments is None or segments[sample, j] == segments[sample, place]]
            seen = [j for j in seen if window is None or place - j < window]
            for head in range(n):
                keys, values = (x[seen, sample, head // per_group] for x in (k, v))
                found = scores.scale * keys @ q[i, sample, head]
                if scores.softcap is not None:
                    found = scores.softcap * torch.tanh(found / scores.softcap)
                if sinks is not None:
                    found, values = torch.cat((found, sinks[head : head + 1])), torch.cat((values, values[:1] * 0))
                rows.append(found.softmax(0) @ values)
    return torch.stack(rows).view(s, b, n * d)


def inputs(s, t, n, g, b=2, d=8, dtype=torch.float32):
    shapes = [(s, b, n, d), (t, b, g, d), (t, b, g, d)]
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
class TestAgainstTheLoop:
    @pytest.mark.parametrize(("n", "g"), [(4, 4), (4, 2), (4, 1)])
    @pytest.mark.parametrize(("s", "t"), [(6, 6), (1, 6), (3, 6), (1, 1)])
    def test_causal(self, kernel, s, t, n, g):
        assert_same(lambda *x: kernel(*x, **PLAIN), slow, inputs(s, t, n, g))

    @pytest.mark.parametrize(("s", "t"), [(7, 7), (1, 7), (3, 7)])
    def test_segments(self, kernel, s, t):
        assert_same(
            lambda *x: kernel(*x, scores=SCORES, segments=Segments(SEGMENTS), window=None, dropout=0.0),
            lambda *x: slow(*x, segments=SEGMENTS),
            inputs(s, t, 4, 2),
        )

    @pytest.mark.parametrize("window", [1, 2, 4, 6, 7, 100])
    @pytest.mark.parametrize(("s", "t"), [(7, 7), (1, 7), (3, 7), (1, 1)])
    @pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["", "segments"])
    def test_window(self, kernel, s, t, window, segments):
        segments = None if segments is None else segments[:, :t]
        packed = None if segments is None else Segments(segments)
        assert_same(
            lambda *x: kernel(*x, scores=SCORES, segments=packed, window=window, dropout=0.0),
            lambda *x: slow(*x, segments=segments, window=window),
            inputs(s, t, 4, 2),
        )

    def test_another_scale(self, kernel):
        options = {**PLAIN, "scores": Scores(1.3)}
        # With AVX-512 torch's fused kernel takes exponentials of 20 bits.
        atol = 4e-6 if kernel is attention.fused else 1e-6
        data = inputs(6, 6, 4, 2)
        assert_same(lambda *x: kernel(*x, **options), lambda *x: slow(*x, scores=Scores(1.3)), data, atol=atol)

    def test_a_window_of_one_is_the_value_itself(self, kernel):
        q, k, v = inputs(5, 5, 2, 2)
        torch.testing.assert_close(kernel(q, k, v, scores=SCORES, segments=None, window=1, dropout=0.0), v.flatten(2))

    def test_documents_do_not_mix(self, kernel):
        """Packed documents give what each gives alone."""
        q, k, v = inputs(9, 9, 4, 2, b=1)
        segments = Segments(torch.tensor([[0] * 4 + [1] * 5]))
        together = kernel(q, k, v, scores=SCORES, segments=segments, window=None, dropout=0.0)
        alone = [kernel(q[r], k[r], v[r], **PLAIN) for r in (slice(0, 4), slice(4, 9))]
        torch.testing.assert_close(together, torch.cat(alone))

    def test_half_precision(self, kernel):
        """Within the rounding of bf16 of the exact result."""
        data = inputs(8, 8, 4, 2, dtype=torch.bfloat16)
        assert_same(lambda *x: kernel(*x, **PLAIN), slow, data, rtol=2e-2, atol=2e-2)

    def test_strides_of_the_layer(self, kernel):
        """Keys and values are slices of the fused projection."""
        s, b, g, per_group, d = 6, 2, 2, 2, 8
        qkv = random(s, b, g, per_group + 2, d)

        def run(qkv):
            q = qkv[:, :, :, :per_group].reshape(s, b, -1, d)
            return kernel(q, qkv[:, :, :, -2], qkv[:, :, :, -1], **PLAIN)

        def plain(qkv):
            return slow(qkv[:, :, :, :per_group].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1])

        assert_same(run, plain, [qkv])

    def test_dropout(self, kernel):
        """Drops about its share of the weights, scales the rest, and follows the generator."""
        s = 64
        q = torch.zeros(s, 1, 1, s)  # every visible key has the same weight
        v = torch.eye(s).view(s, 1, 1, s)
        torch.manual_seed(5)
        out = kernel(q, q, v, scores=SCORES, segments=None, window=None, dropout=0.25)
        torch.manual_seed(5)
        assert out.equal(kernel(q, q, v, scores=SCORES, segments=None, window=None, dropout=0.25))
        assert not out.equal(kernel(q, q, v, scores=SCORES, segments=None, window=None, dropout=0.25))
        weights = out.view(s, s) * torch.arange(1, s + 1).unsqueeze(1)  # 0 or 1 / 0.75 where visible
        kept = weights[torch.ones(s, s).tril().bool()]
        assert 0.70 < kept.gt(0).float().mean() < 0.80
        torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.75))
        assert weights.triu(1).eq(0).all()

    def test_dropout_in_a_window(self, kernel):
        """Nothing outside of the window, and inside the kept share."""
        s, window = 64, 16
        q, v = torch.zeros(s, 1, 1, s), torch.eye(s).view(s, 1, 1, s)
        torch.manual_seed(5)
        weights = (
            kernel(q, q, v, scores=SCORES, segments=None, window=window, dropout=0.25).view(s, s)[window:] * window
        )
        inside = torch.ones(s, s).tril().triu(1 - window).bool()[window:]
        assert weights[~inside].eq(0).all()
        assert 0.70 < weights[inside].gt(0).float().mean() < 0.80
        assert weights.sum() / weights.gt(0).sum() == pytest.approx(1 / 0.75)


@pytest.mark.parametrize("kernel", ["unfused", "rows"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["", "segments"])
@pytest.mark.parametrize("s", [7, 2])
def test_capped_scores(kernel, window, segments, s):
    """The cap bends a third of the scores by more than a tenth."""
    options, data = {"window": window, "scores": CAPPED}, inputs(s, 7, 4, 2)
    packed = None if segments is None else Segments(segments)
    assert_same(
        lambda *x: KERNELS[kernel](*x, segments=packed, **options, dropout=0.0),
        lambda *x: slow(*x, segments=segments, **options),
        data,
    )
    products = 1.3 * torch.einsum("sbngd,tbgd->bngst", data[0].unflatten(2, (2, 2)).transpose(2, 3), data[1])
    assert (products.abs() > 1.1 * (1.5 * torch.tanh(products / 1.5)).abs()).float().mean() > 0.3


def test_a_fused_kernel_does_not_pass_over_a_cap():
    with pytest.raises(AssertionError, match="this kernel cannot cap scores"):
        attention.fused(*inputs(4, 4, 2, 2), **{**PLAIN, "scores": CAPPED})
    with pytest.raises(AssertionError, match="this kernel has no sinks"):
        attention.fused(*inputs(4, 4, 2, 2), **{**PLAIN, "scores": SCORES._replace(sinks=torch.zeros(2))})


class TestSinks:
    """Sinks of -3 to 3, so some heads attend to nothing and others as without one."""

    KERNELS = (
        attention.unfused,
        attention_rows.attention,
        packed(attention_rows.of_blocks(attention_lse.cpu), by_flash=False, grouped=True),
        in_key_blocks(invariant.forward, attention_lse.cpu),
    )

    @pytest.mark.parametrize("kernel", KERNELS, ids=("unfused", "rows", "block", "key blocks"))
    @pytest.mark.parametrize(("s", "window"), [(7, None), (7, 3), (1, None), (1, 3), (2, 3)])
    @pytest.mark.parametrize("documents", [False, True])
    def test_against_the_loop(self, kernel, s, window, documents):
        ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]]) if documents else None
        segments = None if ids is None else segments_of(ids, CPU) if s == 7 else Segments(ids)
        assert_same(
            lambda q, k, v, sinks: kernel(
                q, k, v, scores=SCORES._replace(sinks=sinks), segments=segments, window=window, dropout=0.0
            ),
            lambda q, k, v, sinks: slow(q, k, v, segments=ids, window=window, sinks=sinks),
            [*inputs(s, 7, 4, 2), torch.tensor([-3.0, -1.0, 1.0, 3.0])],
        )

    @pytest.mark.parametrize("kernel", KERNELS[:2], ids=("unfused", "rows"))
    def test_a_cap_is_of_the_scores_of_keys_alone(self, kernel):
        assert_same(
            lambda q, k, v, sinks: kernel(q, k, v, **{**PLAIN, "scores": CAPPED._replace(sinks=sinks)}),
            lambda q, k, v, sinks: slow(q, k, v, scores=CAPPED, sinks=sinks),
            [*inputs(5, 5, 2, 1), torch.tensor([-2.0, 9.0])],
        )

    def test_dropout_is_of_the_probabilities_with_the_sink(self):
        s, sinks = 64, torch.full((1,), 3.0)
        q, v = torch.zeros(s, 1, 1, s), torch.eye(s).view(s, 1, 1, s)
        kernel = attention_rows.of_blocks(attention_lse.with_dropout(attention_lse.cpu))
        weights = kernel(q, q, v, scores=SCORES._replace(sinks=sinks), segments=None, window=None, dropout=0.25)
        expected = 1 / 0.75 / (torch.arange(1, s + 1) + math.exp(3.0))
        survivors = weights.view(s, s) > 0
        torch.testing.assert_close(weights.view(s, s), expected.unsqueeze(1) * survivors)
        assert 0.70 < survivors[torch.ones(s, s).tril().bool()].float().mean() < 0.80


@pytest.mark.parametrize("window", [None, 17])
def test_kernels_agree_on_a_longer_sequence(window):
    data = inputs(80, 80, 4, 2)
    upstream = random(80, 2, 32, seed=9)
    results = [
        outputs_and_gradients(lambda *x: kernel(*x, **{**PLAIN, "window": window}), data, upstream)  # noqa: B023
        for kernel in KERNELS.values()
    ]
    for first, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


class TestWhatSdpaIsAsked:
    """A mask costs memory and the fast kernels."""

    @pytest.fixture
    def asked(self, monkeypatch):
        calls, run = [], torch.nn.functional.scaled_dot_product_attention

        def spy(q, k, v, *, attn_mask, is_causal, **options):
            calls.append((k.shape[2], None if attn_mask is None else attn_mask.shape[-2:], is_causal))
            return run(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
        return calls

    @pytest.mark.parametrize("window", [None, 7, 8])
    def test_a_window_as_long_as_the_sequence_needs_no_mask(self, asked, window):
        attention.fused(*inputs(7, 7, 4, 2), scores=SCORES, segments=None, window=window, dropout=0.0)
        assert asked == [(7, None, True)]

    def test_a_shorter_one_does(self, asked):
        attention.fused(*inputs(7, 7, 4, 2), scores=SCORES, segments=None, window=6, dropout=0.0)
        assert asked == [(7, (7, 7), False)]

    def test_one_query_reads_its_window_of_the_cache_without_a_mask(self, asked):
        attention.fused(*inputs(1, 7, 4, 2), scores=SCORES, segments=None, window=3, dropout=0.0)
        assert asked == [(3, None, False)]

    def test_several_queries_read_the_windows_of_all(self, asked):
        attention.fused(*inputs(2, 7, 4, 2), scores=SCORES, segments=None, window=3, dropout=0.0)
        assert asked == [(4, (2, 4), False)]


class TestFlash:
    def test_why_it_is_missing(self):
        """The dtype is judged before the device is asked for its age, so this needs no GPU."""
        assert flash.missing(torch.device("cuda"), torch.float32) == "the dtype is float32, it needs bf16 or fp16"

    @pytest.fixture
    def calls(self):
        """(kernel, what it asked the other kernel for: lengths, segments, window, dropout, "by flash or not at all")"""
        calls = []

        def otherwise(q, k, v, *, scores, segments, window, dropout):
            only_flash = torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
            calls.append((q.shape[0], k.shape[0], segments is not None, window, dropout, only_flash))
            return attention.fused(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

        return flash.attention(otherwise), calls

    def test_what_it_cannot_do_is_left_to_the_other_kernel(self, calls):
        """Segments, and queries that continue a cache."""
        kernel, asked = calls
        one = Segments(torch.zeros(2, 6, dtype=torch.long))
        kernel(*inputs(6, 6, 4, 2), scores=SCORES, segments=one, window=4, dropout=0.0)
        kernel(*inputs(2, 6, 4, 2), scores=SCORES, segments=None, window=4, dropout=0.0)
        assert asked == [(6, 6, True, 4, 0.0, False), (2, 6, False, 4, 0.0, False)]

    def test_a_window_as_long_as_the_sequence_is_none(self, calls):
        kernel, asked = calls
        for window in (None, 6, 7):
            kernel(*inputs(6, 6, 4, 4), scores=SCORES, segments=None, window=window, dropout=0.0)
        assert asked == [(6, 6, False, None, 0.0, True)] * 3

    @pytest.mark.parametrize("window", [1, 2, 5])
    def test_window(self, calls, window):
        """With the operator that only GPUs have stood in for, as its documentation describes it."""
        kernel, asked = calls
        data = inputs(6, 6, 4, 2, b=3)
        with torch.no_grad(), FlashOperator():
            out = kernel(*data, scores=Scores(0.9), segments=None, window=window, dropout=0.0)
        assert asked == []
        torch.testing.assert_close(out, slow(*data, window=window, scores=Scores(0.9)))

    def test_the_gradient_knows_the_window(self):
        """Shapes only: what autograd asks of the operator's backward."""
        data = [x.to("meta", torch.bfloat16).requires_grad_() for x in inputs(6, 6, 4, 2, b=3)]
        with FlashOperator() as operator:
            out = flash.windowed(*data, 0.3, 4, 0.25)
            gradients = torch.autograd.grad(out, data, torch.empty_like(out))
        assert out.shape == (6, 3, 32) and [g.shape for g in gradients] == [x.shape for x in data]
        assert operator.asked_of_backward == [(0.25, 0.3, 3, 0)]


@pytest.mark.parametrize("backends", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]])
def test_named_kernels_of_torch(backends, monkeypatch):
    """The first of them that takes a call, in their order, and no other."""
    enabled, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def seen(*args, **options):
        enabled.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return sdpa(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    data = inputs(6, 6, 4, 2)
    out = attention.fused_by(*backends)(*data, **PLAIN)
    assert enabled == [(len(backends) == 2, False)]
    torch.testing.assert_close(out, attention.fused(*data, **PLAIN))


@pytest.mark.parametrize("g", [4, 2, 1])
def test_a_key_head_for_every_query_head(g):
    heads = []

    def kernel(q, k, v, **options):
        heads.append((k.shape[2], v.shape[2]))
        return attention.unfused(q, k, v, **options)

    assert_same(
        lambda *x: attention.with_equal_heads(kernel)(*x, **PLAIN),
        lambda *x: attention.unfused(*x, **PLAIN),
        inputs(5, 5, 4, g),
    )
    assert heads == [(4, 4)]


class FlashOperator(TorchDispatchMode):
    """torch's FlashAttention on [b, s, heads, d] tensors of the CPU; of its backward, the dropout, scale and window
    that it was given."""

    def __init__(self):
        super().__init__()
        self.asked_of_backward = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten._flash_attention_backward.default:
            names = ("scale", "window_size_left", "window_size_right")
            self.asked_of_backward.append((args[10], *(kwargs[name] for name in names)))
        if operator is torch.ops.aten._flash_attention_forward.default and args[0].device.type == "cpu":
            return self.forward(*args, **kwargs)
        return operator(*args, **kwargs)

    @staticmethod
    def forward(q, k, v, ends_q, ends_k, s, t, dropout, causal, debug, *, scale, window_size_left, window_size_right):
        assert (ends_q, ends_k, s, t) == (None, None, q.shape[1], k.shape[1])
        assert (dropout, causal, debug) == (0.0, False, False)
        place = torch.arange(t) - torch.arange(s).unsqueeze(1)  # of a key beside its query
        hidden = (place < -window_size_left) | (place > window_size_right)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        scores = scale * torch.einsum("bsnd,btnd->bnst", q, k)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bnst,btnd->bsnd", weights, v), *[torch.empty(0)] * 4
