"""Attention of packed documents without a mask: the same as with one, and no tensor of queries x keys on a GPU."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.kernels.backends import flash
from megatron.kernels.choose_attention import candidates
from megatron.kernels.ops import attention, attention_packed, attention_rows
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, segments_of
from tests.unit.kernels.close import assert_same, random
from tests.unit.kernels.variable_length import VariableLengthOperator

CPU = torch.device("cpu")
SCORES, CAPPED = Scores(0.3), Scores(1.3, 1.5)
# Lengths of the documents of each sample: several, all of one token, one, one token at either end.
PACKED = {
    "one sample": [(5, 2, 9)],
    "two samples": [(5, 2, 9), (1, 14, 1)],
    "tokens alone": [(1,) * 16],
    "three samples": [(16,), (1,) * 16, (8, 8)],
    "two lengths": [(3, 5, 3, 5), (5, 5, 3, 3), (3, 3, 5, 5)],
}
ONE_BY_ONE = {
    "fused": attention_packed.by_document(attention.fused),
    "unfused": attention_packed.by_document(attention.unfused),
    "rows": attention_packed.by_document(attention_rows.attention),
}


def packed(samples):
    """Segments of samples with documents of these lengths."""
    rows = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in samples]
    return segments_of(torch.tensor(rows), CPU)


def inputs(segments, n, g, d=8):
    b, s = segments.ids.shape
    shapes = [(s, b, n, d), (s, b, g, d), (s, b, g, d)]
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def against_the_mask(kernel, segments, heads, window, scores=SCORES):
    """Output and gradients in fp32 against the reference with a mask in fp64."""
    options = {"scores": scores, "segments": segments, "window": window, "dropout": 0.0}
    assert_same(lambda *x: kernel(*x, **options), lambda *x: attention.unfused(*x, **options), inputs(segments, *heads))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
class TestAsWithAMask:
    @pytest.mark.parametrize("kernel", ["fused", "unfused"])
    def test_one_document_after_the_other(self, kernel, name, heads, window):
        against_the_mask(ONE_BY_ONE[kernel], packed(PACKED[name]), heads, window)

    def test_variable_length(self, name, heads, window):
        """With a stand-in for the operator that only GPUs have."""
        with VariableLengthOperator() as operator:
            against_the_mask(attention_packed.variable_length, packed(PACKED[name]), heads, window)
        assert operator.calls == 1


@pytest.mark.parametrize("kernel", ["unfused", "rows"])
@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores(kernel, window):
    against_the_mask(ONE_BY_ONE[kernel], packed(PACKED["two samples"]), (4, 2), window, CAPPED)


def test_documents_of_one_length_are_a_batch():
    """Many of few lengths, with the bits of one after the other; few of many lengths are not copied."""
    shapes = []

    def recorded(q, *others, **options):
        shapes.append(tuple(q.shape[:2]))
        return attention.fused(q, *others, **options)

    segments, kernel = packed(PACKED["two lengths"]), attention_packed.by_document(recorded)
    data, options = inputs(segments, 4, 4), {"scores": SCORES, "window": None}
    together = kernel(*data, segments=segments, dropout=0.0, **options)
    assert shapes == [(3, 6), (5, 6)]
    alone = []
    for sample, lengths in enumerate(PACKED["two lengths"]):
        parts = zip(*(x[:, sample : sample + 1].split(lengths) for x in data), strict=True)
        out = [attention.fused(*part, segments=None, dropout=0.0, **options) for part in parts]
        alone.append(torch.cat(out))
    assert torch.equal(together, torch.cat(alone, dim=1))
    shapes.clear()
    segments = packed(PACKED["two samples"])
    kernel(*inputs(segments, 4, 4), segments=segments, dropout=0.0, **options)
    assert [count for _, count in shapes] == [1] * 6


def test_the_output_of_one_sample_is_no_copy():
    """Its storage is the operator's, which keeps it for backward."""
    segments = packed(PACKED["one sample"])
    q, k, v = inputs(segments, 4, 2)
    with VariableLengthOperator():
        out = attention_packed.variable_length(
            q.requires_grad_(), k, v, scores=SCORES, segments=segments, window=None, dropout=0.0
        )
    assert out.is_contiguous() and out._base is not None and out.shape == (16, 1, 32)


class TestWhatGoesWhere:
    @pytest.fixture
    def calls(self, monkeypatch):
        """(kernel, the names of what it called)"""
        found = []

        def whole(q, k, v, *, segments, **options):
            found.append("whole" if segments is None else "masked")
            return attention.fused(q, k, v, segments=segments, **options)

        def variable_length(q, *_, **options):
            found.append("flash")
            return q.flatten(2)

        monkeypatch.setattr(attention_packed, "variable_length", variable_length)
        return lambda by_flash: attention_packed.packed(whole, by_flash=by_flash), found

    @pytest.mark.parametrize(
        ("by_flash", "d", "expected"),
        [
            (True, 64, ["flash"]),
            (True, flash.LARGEST_HEAD, ["flash"]),
            (True, flash.LARGEST_HEAD + 8, ["whole"] * 3),
            (True, 20, ["whole"] * 3),
            (False, 64, ["whole"] * 3),
        ],
    )
    def test_documents(self, calls, by_flash, d, expected):
        make, found = calls
        segments = packed(PACKED["one sample"])
        make(by_flash)(*inputs(segments, 4, 2, d), scores=SCORES, segments=segments, window=None, dropout=0.0)
        assert found == expected

    def test_all_else(self, calls):
        """No documents, only their ids, and new queries to a cache."""
        make, found = calls
        segments = packed(PACKED["one sample"])
        q, k, v = inputs(segments, 4, 2)
        for queries, documents in ((q, None), (q, Segments(segments.ids)), (q[-1:], segments)):
            make(True)(queries, k, v, scores=SCORES, segments=documents, window=None, dropout=0.0)
        assert found == ["whole", "masked", "masked"]


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


class TestOnAGpu:
    """Traced with tensors that have shapes and no memory: 8,192 tokens, 32 heads in 8 groups.

    Builds of torch without CUDA have no autograd for fake CUDA tensors, so gradients are traced on the meta device.
    """

    S, N, G, D = 8192, 32, 8, 128
    LENGTHS = (1, 1000, 24, *[1024] * 6, 1023)

    def largest(self, kernel, dtype, window=None, dropout=0.0, b=1):
        assert sum(self.LENGTHS) == self.S
        with Largest() as seen:
            leaves, segments = self.inputs("meta", dtype, b)
            out = kernel(*leaves, scores=SCORES, segments=segments, window=window, dropout=dropout)
            gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
        assert out.shape == (self.S, b, self.N * self.D) and out.dtype == dtype
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in leaves]
        return seen.numel

    def inputs(self, device, dtype, b):
        heads = (self.N, self.G, self.G)
        leaves = [torch.empty(self.S, b, n, self.D, dtype=dtype, device=device, requires_grad=True) for n in heads]
        ids = torch.empty(b, self.S, dtype=torch.int64, device=device)
        starts = torch.empty(1 + b * len(self.LENGTHS), dtype=torch.int32, device=device)
        return leaves, Segments(ids, starts, self.LENGTHS * b)

    def candidate(self, name):
        return next(each.kernel for each in candidates("auto") if each.name == name)

    def test_a_mask_is_queries_times_keys(self):
        """What the kernels below avoid."""
        assert self.largest(attention.fused, torch.bfloat16) >= self.S**2

    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize(("dropout", "b"), [(0.0, 1), (0.1, 1), (0.0, 2)])
    def test_flash(self, window, dropout, b):
        """Nothing is larger than the queries."""
        kernel = self.candidate("FlashAttention-2")
        assert self.largest(kernel, torch.bfloat16, window, dropout, b) == b * self.S * self.N * self.D

    @torch.no_grad()
    def test_flash_on_its_device(self):
        """On fake CUDA tensors: nothing is made elsewhere."""
        kernel = self.candidate("FlashAttention-2")
        with FakeTensorMode():
            leaves, segments = self.inputs("cuda", torch.bfloat16, 2)
            out = kernel(*leaves, scores=SCORES, segments=segments, window=None, dropout=0.0)
        assert out.shape == (self.S, 2, self.N * self.D) and out.device == torch.device("cuda", 0)

    @pytest.mark.parametrize(("name", "dtype"), [("memory-efficient", torch.float32), ("cuDNN", torch.bfloat16)])
    def test_others(self, name, dtype):
        """Nothing is larger than the queries, even where torch computes all scores of a document at once."""
        assert self.largest(self.candidate(name), dtype) == self.S * self.N * self.D


def test_documents_have_no_part_in_each_other():
    """Without a mask nothing hides one from another: numbers that are not finite stay in theirs."""
    segments = packed(PACKED["one sample"])
    q, k, v = inputs(segments, 4, 2)
    k[6] = float("nan")
    out = ONE_BY_ONE["fused"](q, k, v, scores=SCORES, segments=segments, window=None, dropout=0.0)
    finite = [bool(x.isfinite().all()) for x in out]
    assert [len(list(run)) for _, run in itertools.groupby(finite)] == [6, 1, 9] and not finite[6]
