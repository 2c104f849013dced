"""Attention kernels against a loop over queries, and what `choose` picks."""

import math

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.kernels.backends import flash
from megatron.kernels.ops import attention, gemm
from tests.unit.kernels.close import assert_same, outputs_and_gradients, random

KERNELS = {"unfused": attention.unfused, "fused": attention.fused}
CPU = torch.device("cpu")


def slow(q, k, v, segments=None):
    """One query at a time, keys picked by the rule in words."""
    s, b, n, d = q.shape
    t, per_group = k.shape[0], n // k.shape[2]
    rows = []
    for i in range(s):
        place = i + t - s
        for sample in range(b):
            seen = [j for j in range(place + 1) if segments is None or segments[sample, j] == segments[sample, place]]
            for head in range(n):
                keys, values = (x[seen, sample, head // per_group] for x in (k, v))
                weights = (keys @ q[i, sample, head] / math.sqrt(d)).softmax(0)
                rows.append(weights @ values)
    return torch.stack(rows).view(s, b, n * d)


def inputs(s, t, n, g, b=2, d=8, dtype=torch.float32):
    shapes = [(s, b, n, d), (t, b, g, d), (t, b, g, d)]
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
class TestAgainstTheLoop:
    @pytest.mark.parametrize(("n", "g"), [(4, 4), (4, 2), (4, 1)])
    @pytest.mark.parametrize(("s", "t"), [(6, 6), (1, 6), (3, 6), (1, 1)])
    def test_causal(self, kernel, s, t, n, g):
        assert_same(lambda *x: kernel(*x, segments=None, dropout=0.0), slow, inputs(s, t, n, g))

    @pytest.mark.parametrize(("s", "t"), [(7, 7), (1, 7), (3, 7)])
    def test_segments(self, kernel, s, t):
        segments = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2]])
        assert_same(
            lambda *x: kernel(*x, segments=segments, dropout=0.0),
            lambda *x: slow(*x, segments=segments),
            inputs(s, t, 4, 2),
        )

    def test_documents_do_not_mix(self, kernel):
        """Packed documents give what each gives alone."""
        q, k, v = inputs(9, 9, 4, 2, b=1)
        together = kernel(q, k, v, segments=torch.tensor([[0] * 4 + [1] * 5]), dropout=0.0)
        alone = [kernel(q[r], k[r], v[r], segments=None, dropout=0.0) for r in (slice(0, 4), slice(4, 9))]
        torch.testing.assert_close(together, torch.cat(alone))

    def test_half_precision(self, kernel):
        """Within the rounding of bf16 of the exact result."""
        data = inputs(8, 8, 4, 2, dtype=torch.bfloat16)
        assert_same(lambda *x: kernel(*x, segments=None, dropout=0.0), slow, data, rtol=2e-2, atol=2e-2)

    def test_strides_of_the_layer(self, kernel):
        """Keys and values are slices of the fused projection."""
        s, b, g, per_group, d = 6, 2, 2, 2, 8
        qkv = random(s, b, g, per_group + 2, d)

        def run(qkv):
            q = qkv[:, :, :, :per_group].reshape(s, b, -1, d)
            return kernel(q, qkv[:, :, :, -2], qkv[:, :, :, -1], segments=None, dropout=0.0)

        def plain(qkv):
            return slow(qkv[:, :, :, :per_group].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1])

        assert_same(run, plain, [qkv])

    def test_dropout(self, kernel):
        """Drops about its share of the weights, scales the rest, and follows the generator."""
        s = 64
        q = torch.zeros(s, 1, 1, s)  # every visible key has the same weight
        v = torch.eye(s).view(s, 1, 1, s)
        torch.manual_seed(5)
        out = kernel(q, q, v, segments=None, dropout=0.25)
        torch.manual_seed(5)
        assert out.equal(kernel(q, q, v, segments=None, dropout=0.25))
        assert not out.equal(kernel(q, q, v, segments=None, dropout=0.25))
        weights = out.view(s, s) * torch.arange(1, s + 1).unsqueeze(1)  # 0 or 1 / 0.75 where visible
        kept = weights[torch.ones(s, s).tril().bool()]
        assert 0.70 < kept.gt(0).float().mean() < 0.80
        torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.75))
        assert weights.triu(1).eq(0).all()


def test_kernels_agree_on_a_longer_sequence():
    data = inputs(80, 80, 4, 2)
    upstream = random(80, 2, 32, seed=9)
    results = [
        outputs_and_gradients(lambda *x: kernel(*x, segments=None, dropout=0.0), data, upstream)  # noqa: B023
        for kernel in KERNELS.values()
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def slow_dtypes(monkeypatch):
    """What this CPU has no instructions for, as the test says: machines differ."""
    return lambda *dtypes: monkeypatch.setattr(gemm, "_SLOW_ON_CPU", set(dtypes))


class TestChoose:
    @pytest.mark.parametrize(
        ("asked", "kernel", "said"),
        [
            ("unfused", attention.unfused, "unfused (plain torch, asked for)"),
            ("fused", attention.fused, "fused (torch SDPA; asked for)"),
            ("auto", attention.fused, "fused (torch SDPA; no flash: the device is cpu)"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_on_cpu(self, asked, kernel, said, dtype, slow_dtypes):
        slow_dtypes(torch.float16)
        assert attention.choose(asked, CPU, dtype) == (kernel, said)

    @pytest.mark.parametrize(("asked", "why"), [("fused", "asked for"), ("auto", "no flash: the device is cpu")])
    def test_on_a_cpu_without_bf16(self, asked, why, slow_dtypes):
        """In fp32: the result is rounded once, where the native kernel rounds in between."""
        slow_dtypes(torch.bfloat16)
        kernel, said = attention.choose(asked, CPU, torch.bfloat16)
        assert said == f"fused (torch SDPA in fp32, this CPU has no bfloat16 products; {why})"
        data = inputs(8, 8, 4, 2, dtype=torch.bfloat16)
        expected = attention.fused(*(x.float() for x in data), segments=None, dropout=0.0).bfloat16()
        assert kernel(*data, segments=None, dropout=0.0).equal(expected)
        assert_same(lambda *x: kernel(*x, segments=None, dropout=0.0), slow, data, rtol=1e-2, atol=1e-2)

    def test_flash_on_cpu_is_an_error_with_the_reason(self):
        with pytest.raises(ConfigError, match="--attention-backend flash cannot be used: the device is cpu; use auto"):
            attention.choose("flash", CPU, torch.bfloat16)

    def test_why_flash_is_missing(self):
        """The dtype is judged before the device is asked for its age, so this needs no GPU."""
        assert flash.missing(torch.device("cuda"), torch.float32) == "the dtype is float32, it needs bf16 or fp16"

    def test_flash_leaves_masks_to_the_other_kernel(self):
        """Segments and cached queries never reach the flash kernel."""
        calls = []

        def otherwise(q, k, v, *, segments, dropout):
            calls.append((q.shape[0], k.shape[0], segments is None, dropout))
            return attention.fused(q, k, v, segments=segments, dropout=dropout)

        kernel = flash.attention(otherwise)
        kernel(*inputs(6, 6, 4, 2), segments=torch.zeros(2, 6, dtype=torch.long), dropout=0.0)
        kernel(*inputs(2, 6, 4, 2), segments=None, dropout=0.0)
        assert calls == [(6, 6, False, 0.0), (2, 6, True, 0.0)]
