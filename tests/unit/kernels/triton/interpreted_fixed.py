"""Products and attention in tiles of one shape in Triton's interpreter; run by tests/unit/kernels/test_triton.py."""

import math

import pytest
import torch

from benchmarks.logprob_parity import difference, sample, trained_logprobs
from megatron.base.errors import ConfigError
from megatron.core.inference.engine.sampling import Sampling
from megatron.kernels import choose, choose_invariant, fused
from megatron.kernels.backends.triton import fixed_attention, fixed_product
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.batch_invariant import attention as reference
from megatron.kernels.ops.grouped_gemm import loop
from tests import pool
from tests.unit.inference.small import endless_tokenizer, small_model
from tests.unit.inference.test_parity import EXACT, MODELS, prompts
from tests.unit.kernels.close import random
from tests.unit.kernels.triton.near import assert_near

DTYPES = (torch.float32, torch.float16)  # the interpreter multiplies no bfloat16
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
SCORES = Scores(1 / math.sqrt(12))


def product(x, matrix, bias=None):
    kernel = fixed_product.TileProduct(matrix, bias)
    out = x.new_empty(len(x), kernel.columns)
    kernel(x, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 130, 40), (1, 64, 128), (200, 33, 150)])
def test_products(shape, with_bias, dtype):
    rows, k, n = shape
    x, weight, bias = random(rows, k).to(dtype), random(n, k, seed=1).to(dtype), random(n, seed=2).to(dtype)
    out = product(x, weight.t(), bias if with_bias else None)
    expected = x.float() @ weight.t().float() + (bias.float() if with_bias else 0.0)
    assert_near((out,), (expected.to(dtype),), TOLERANCES[dtype])
    for a, b in ((0, 1), (rows // 2, rows), (max(0, rows - 3), rows)):
        assert torch.equal(product(x[a:b].clone(), weight.t(), bias if with_bias else None), out[a:b])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(70, 0, 3, 131), (0, 0, 1), (5,), (0, 0)])
def test_products_of_experts(sizes, dtype):
    total = sum(sizes)
    values, matrices = random(total, 40).to(dtype), random(len(sizes), 72, 40, seed=1).to(dtype).transpose(1, 2)
    assignments = Assignments(torch.arange(total), torch.tensor(sizes).cumsum(0).int(), list(sizes))
    out = fixed_product.grouped(values, matrices, assignments)
    assert_near((out,), (loop(values.float(), matrices.float(), assignments).to(dtype),), TOLERANCES[dtype])
    for expert, (size, rows) in enumerate(zip(sizes, out.split(sizes), strict=True)):
        start = sum(sizes[:expert])
        if size:
            assert torch.equal(product(values[start : start + 1], matrices[expert]), rows[:1])


def heads(tokens, samples, queries, dtype):
    """q of 2 * queries heads of 12 channels, k of 2, v of 2 with 8 channels."""
    shapes = ((2 * queries, 12), (2, 12), (2, 8))
    return [random(tokens, samples, *shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (3, 3.0)])
def test_attention(queries, softcap, window, dtype):
    """Packed documents, the last ones of which continue; and each alone, whole and against a cache of keys."""
    lengths, scores = (130, 1, 40), SCORES._replace(softcap=softcap)
    q, k, v = heads(sum(lengths), 2, queries, dtype)
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    out, lse = fixed_attention.forward(q, k, v, scores, ids, window)
    expected = reference.forward(q.float(), k.float(), v.float(), scores, ids, window)
    assert_near((out.float(), lse), expected, TOLERANCES[dtype])
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        document = [x[part, 1:] for x in (q, k, v)]
        alone, alone_lse = fixed_attention.forward(*document, scores, None, window)
        assert torch.equal(alone[:, 0], out[part, 1]) and torch.equal(alone_lse[0], lse[1, :, part])
        for place in {0, length // 2, length - 1}:
            cached = [document[0][place : place + 1], *(x[: place + 1] for x in document[1:])]
            assert torch.equal(fixed_attention.forward(*cached, scores, None, window)[0][0], alone[place])
        start += length


def test_values_that_are_not_finite_stay_in_their_document():
    q, k, v = heads(80, 1, 1, torch.float32)
    ids = (torch.arange(80) >= 30).long().unsqueeze(0)
    expected, _ = fixed_attention.forward(q, k, v, SCORES, ids, None)
    k[40], v[50] = float("nan"), float("inf")
    assert torch.equal(fixed_attention.forward(q, k, v, SCORES, ids, None)[0][:30], expected[:30])


@pytest.fixture
def interpreted(monkeypatch):
    """Models get the Triton kernels, as on CUDA."""
    monkeypatch.setattr(fused, "missing", lambda device: None)
    of_device = choose_invariant.choose_invariant
    monkeypatch.setattr(choose, "choose_invariant", lambda device, *rest: of_device(torch.device("cuda"), *rest))


@pytest.mark.parametrize("name", ["dense", "sigmoid experts"])
def test_a_model_samples_what_it_trains_on(name, interpreted, monkeypatch):
    """Prompts that join and leave the batch; in training padded, and packed."""
    monkeypatch.setattr(choose, "check_invariance", lambda *arguments: None)  # slow here
    model, build = small_model(pool.groups(), **{**MODELS[name], **EXACT})
    assert build.kernels.layers_choice == "tiles of 64 rows (--batch-invariant-mode)"
    options = {"max_new_tokens": 2, "sampling": Sampling(temperature=1.0), "seeds": [0, 1], "batch_size": 2}
    sequences = sample(model, build, endless_tokenizer(99), prompts((1, 66)), **options)
    with torch.no_grad():
        for parts in ({}, {"per_row": 2}):
            gap = difference(sequences, trained_logprobs(model, build, sequences, **parts))
            assert (gap.tokens, gap.equal, gap.largest) == (4, 1.0, 0.0)


def test_a_product_that_looks_at_its_rows_is_refused(interpreted, monkeypatch):
    launch = fixed_product._launch
    monkeypatch.setattr(fixed_product, "_launch", lambda x, *others: launch(x + len(x) * 1e-3, *others))
    with pytest.raises(ConfigError, match="gave a token other bits"):
        small_model(pool.groups(), **{**MODELS["dense"], **EXACT})
