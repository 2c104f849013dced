"""Attention of packed documents by CUDA's kernels, which make no mask, against the reference, which does."""

import pytest
import torch

from megatron.kernels.backends import flash
from megatron.kernels.choose_attention import candidates
from megatron.kernels.ops import attention, attention_packed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import segments_of
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.kernels.close import outputs_and_gradients, random

pytestmark = NEEDS_CUDA
HALVES = [torch.bfloat16, torch.float16]
SCORES = Scores(0.1)
# Documents of one token, of one block of the kernels and of several, and a sample that is one.
PACKED = {"one sample": [(1, 70, 129, 56)], "two samples": [(256,), (1, 1, 200, 54)], "all alone": [(1,) * 256]}


@pytest.fixture(autouse=True)
def needs_ampere():
    reason = flash.missing(CUDA, torch.bfloat16)
    if reason:
        pytest.skip(f"no FlashAttention: {reason}")


def chosen(dtype):
    name = "FlashAttention-2" if dtype.itemsize == 2 else "memory-efficient"
    return next(each.kernel for each in candidates("auto") if each.name == name)


def packed(samples):
    rows = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in samples]
    return segments_of(torch.tensor(rows), CUDA)


def inputs(segments, n, g, d, dtype):
    b, s = segments.ids.shape
    shapes = [(s, b, n, d), (s, b, g, d), (s, b, g, d)]
    return [random(*shape, dtype=dtype, seed=seed).to(CUDA) for seed, shape in enumerate(shapes)]


def against_the_mask(kernel, name, heads, d, dtype, window):
    segments = packed(PACKED[name])
    data = inputs(segments, *heads, d, dtype)
    upstream = random(*data[0].shape[:2], heads[0] * d, seed=9).to(CUDA)
    options = {"scores": SCORES, "segments": segments, "window": window, "dropout": 0.0}
    found = outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream)
    exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.double() for x in data], upstream)
    for a, b in zip(found, exact, strict=True):
        # The gradient of a query that sees its own key alone is zero: what is left is the rounding of numbers near one.
        scale = max(float(b.abs().max()), 1.0)
        assert (a - b).abs().max() < scale * max(1e-5, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 50])
class TestAsWithAMask:
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("d", [64, 128])
    def test_variable_length(self, name, heads, window, dtype, d):
        against_the_mask(attention_packed.variable_length, name, heads, d, dtype, window)

    @pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
    def test_one_document_after_the_other(self, name, heads, window, dtype):
        against_the_mask(attention_packed.by_document(attention.fused), name, heads, 64, dtype, window)

    @pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
    @pytest.mark.parametrize("d", [64, 20])
    def test_chosen(self, name, heads, window, dtype, d):
        against_the_mask(chosen(dtype), name, heads, d, dtype, window)


@pytest.mark.parametrize("window", [None, 16])
def test_dropout(window):
    """Drops about its share of the weights, scales the rest, and follows the generator."""
    segments = packed([(40, 1, 87)])
    q, v = torch.zeros(128, 1, 1, 128, dtype=torch.bfloat16, device=CUDA), torch.eye(128, device=CUDA).bfloat16()
    options = {"scores": SCORES, "segments": segments, "window": window}
    kernel = attention_packed.variable_length
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(kernel(q, q, v.view(128, 1, 1, 128), **options, dropout=0.25).view(128, 128))
    assert results[0].equal(results[1]) and not results[0].equal(results[2])
    exact = attention.unfused(q, q, v.view(128, 1, 1, 128), **options, dropout=0.0).view(128, 128)
    assert results[0][exact == 0].eq(0).all()
    kept = results[0][exact > 0]
    assert 0.70 < kept.gt(0).float().mean() < 0.80
    torch.testing.assert_close(kept[kept > 0], exact[exact > 0][kept > 0] / 0.75, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_linear_and_the_host_never_waits(dtype):
    """8,192 tokens, 32 heads in 8 groups: all scores in fp32 would be 128 times the queries in bf16."""
    s, n, g, d = 8192, 32, 8, 128
    ids = torch.arange(s).div(1000, rounding_mode="floor").expand(1, s)
    leaves = [torch.randn(s, 1, heads, d, dtype=dtype, device=CUDA, requires_grad=True) for heads in (n, g, g)]
    kernel = chosen(dtype)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = kernel(*leaves, scores=SCORES, segments=segments_of(ids, CUDA), window=None, dropout=0.0)
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    queries = leaves[0].numel() * leaves[0].element_size()
    assert torch.cuda.max_memory_allocated() - before < 20 * queries
