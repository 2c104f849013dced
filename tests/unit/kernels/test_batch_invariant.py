"""Kernels of --batch-invariant-mode: a row gets the same bits in any batch, and gradients are those of plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels import choose_invariant
from megatron.kernels.choose import choose_kernels
from megatron.kernels.fused import plain_activations
from megatron.kernels.ops import attention, attention_lse, cross_entropy, gemm, routing, weight_grad
from megatron.kernels.ops.assignments import Assignments, row_order
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.batch_invariant import activation as invariant_activation
from megatron.kernels.ops.batch_invariant import attention as invariant_attention
from megatron.kernels.ops.batch_invariant import cross_entropy as invariant_cross_entropy
from megatron.kernels.ops.batch_invariant import expert_tree
from megatron.kernels.ops.batch_invariant import gemm as invariant_gemm
from megatron.kernels.ops.batch_invariant import routing as invariant_routing
from megatron.kernels.ops.linear import PlainLinear
from megatron.kernels.ops.routing import RouterKernels
from megatron.spec.moe import RouterSpec

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 1e-5  # of results in fp32 that differ in the order of sums
LINEAR = invariant_gemm.InvariantLinear(weight_grad.separate, invariant_gemm.BlockProduct)
CLAMPED = {"quick_geglu": True, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}
PLAIN = plain_activations(ModelConfig(**CLAMPED))
ACTIVATIONS = invariant_activation.activations(PLAIN)
PARTS = ((0, 1), (36, 37), (3, 10), (5, 37))  # of 37 rows: the first, the last, a few, and more than a block


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_in_parts(function, rows):
    """Whether `function` of some rows gives the bits that it gives them among all."""
    whole = function(rows)
    return all(torch.equal(function(rows[a:b].clone()), whole[a:b]) for a, b in PARTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_do_not_depend_on_the_batch(dtype, with_bias):
    weight, bias = numbers(50, 300, dtype=dtype, seed=1), numbers(50, dtype=dtype, seed=2) if with_bias else None
    kernel, rows = LINEAR, numbers(37, 300, dtype=dtype)
    assert same_in_parts(lambda x: kernel.output(x, weight, bias), rows)
    out = torch.empty(37, 50, dtype=dtype)
    kernel.output_rows(weight, bias)(rows, out)
    assert torch.equal(out, kernel.output(rows.view(37, 1, 300), weight, bias).view(37, 50))
    expected = PlainLinear(weight_grad.separate).output(rows, weight, bias)
    torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=TOLERANCE)


def test_a_cpu_without_half_precision_multiplies_in_fp32(monkeypatch):
    rows, weight = numbers(37, 64, dtype=torch.bfloat16), numbers(48, 64, dtype=torch.bfloat16, seed=1)
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16})
    assert same_in_parts(lambda x: LINEAR.output(x, weight), rows)
    exact = F.linear(rows.double(), weight.double())
    assert (LINEAR.output(rows, weight).double() - exact).abs().max() <= exact.abs().max() / 2**9


def test_products_have_the_gradients_of_plain_ones():
    arguments = [numbers(5, 3, 40).requires_grad_(), numbers(7, 40, seed=1).requires_grad_()]
    compare_gradients(LINEAR.product, gemm.linear, arguments)


def test_a_product_of_no_rows_is_empty():
    assert LINEAR.output(torch.empty(0, 2, 8), torch.ones(3, 8)).shape == (0, 2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_do_not_depend_on_the_batch(dtype):
    """The rows of an expert, and the experts that have rows, change nothing."""
    matrices, values = numbers(3, 64, 40, dtype=dtype, seed=1), numbers(50, 64, dtype=dtype)

    def products(rows, sizes):
        ends = torch.tensor(sizes).cumsum(0).int()
        return invariant_gemm.grouped(rows, matrices, Assignments(torch.arange(len(rows)), ends, sizes))

    whole = products(values, [35, 0, 15])
    assert torch.equal(products(values[34:36], [1, 0, 1]), whole[34:36])
    assert torch.equal(products(values[:35].flip(0), [35, 0, 0]), whole[:35].flip(0))
    expected = torch.cat([values[:35].float() @ matrices[0].float(), values[35:].float() @ matrices[2].float()])
    torch.testing.assert_close(whole.float(), expected, rtol=1e-2, atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [8, 12, 6, 5, 1])
def test_results_of_experts_are_added_up_in_a_tree(experts, dtype):
    """As a recursion over halves does, and by ranks with equal numbers of experts as by one."""
    chosen = torch.rand(30, experts, generator=torch.Generator().manual_seed(1)) < 0.6
    chosen[7] = False
    values = numbers(30, experts, 20, dtype=dtype).masked_fill(~chosen.unsqueeze(-1), float("nan"))

    def tree(values, chosen):
        """[rows, E, h], chosen [rows, E] -> [rows, h], and whether there is anything."""
        half, odd = divmod(values.shape[1], 2)
        parts = [(values[:, e], chosen[:, e]) for e in range(values.shape[1])]
        if not odd:
            parts = [tree(values[:, p], chosen[:, p]) for p in (slice(half), slice(half, None))]
        total, present = parts[0]
        for part, addend_present in parts[1:]:
            both = torch.where(addend_present.unsqueeze(-1), total + part, total)
            total, present = torch.where(present.unsqueeze(-1), both, part), present | addend_present
        return total, present

    def added(values, chosen):
        """[rows, E, h], chosen [rows, E] -> [rows, h], from the assignments."""
        expert, row = chosen.t().nonzero(as_tuple=True)
        ends = chosen.sum(0).cumsum(0).int()
        by_row = row_order(Assignments(row, ends, []), len(values))
        return expert_tree.add_up(values[row, expert], by_row, ends)

    expected, present = tree(values, chosen)
    whole = added(values, chosen)
    assert torch.equal(whole, expected.masked_fill(~present.unsqueeze(-1), 0.0))
    for ranks in {1, experts & -experts}:
        parts = zip(values.chunk(ranks, dim=1), chosen.chunk(ranks, dim=1), strict=True)
        sums, holds = zip(*((added(*part), part[1].any(1)) for part in parts), strict=True)
        assert torch.equal(added(torch.stack(sums, dim=1), torch.stack(holds, dim=1)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_do_not_depend_on_the_place(name, dtype):
    """An odd width: the last elements of a tensor are no whole vector."""
    function = ACTIVATIONS[name]
    assert same_in_parts(function, numbers(37, 2 * 23, dtype=dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_values_and_gradients_of_plain_ones(name):
    compare_gradients(ACTIVATIONS[name], PLAIN[name], [(numbers(9, 30) * 2).requires_grad_()])


def test_sigmoid_is_composed():
    assert same_in_parts(invariant_activation.sigmoid, numbers(37, 23))
    compare_gradients(invariant_activation.sigmoid, torch.sigmoid, [numbers(9, 3).requires_grad_()])


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [6, 8])
def test_routing_does_not_depend_on_the_batch(score_function, experts):
    rule = RouterSpec(32, experts, 3, score_function, normalized=True, scaling=2.5, has_bias=True)
    x, weight, bias = numbers(37, 32), numbers(experts, 32, seed=1), numbers(experts, seed=2)
    router = RouterKernels(LINEAR.output, invariant_routing.route, routing.gradient)

    def routed(x, forced=None):
        return router.route(router.logits(x, weight, None), bias, rule, forced)

    assert same_in_parts(lambda x: routed(x).weights, x)
    assert same_in_parts(lambda x: routed(x).chosen, x)
    plain = routing.SEPARATE.route(F.linear(x, weight), bias, rule, None)
    assert torch.equal(routed(x).chosen, plain.chosen)
    torch.testing.assert_close(routed(x).weights, plain.weights, rtol=TOLERANCE, atol=TOLERANCE)
    forced = plain.chosen.flip(1)
    assert torch.equal(routed(x, forced).chosen, forced)
    assert routed(x[:0]).weights.shape == (0, 3)


@pytest.mark.parametrize("size", [99, 40000])  # of the second torch adds up a single row in several threads
def test_statistics_of_the_loss_do_not_depend_on_the_batch(size):
    logits, targets = numbers(37, size), torch.arange(37)
    statistics = invariant_cross_entropy.local_statistics
    whole = statistics(logits, targets, 5)
    for a, b in PARTS:
        assert torch.equal(statistics(logits[a:b].clone(), targets[a:b], 5), whole[:, a:b])
    assert torch.equal(statistics(logits.t().contiguous().t(), targets, 5), whole)  # as gathered over tp
    torch.testing.assert_close(
        whole, cross_entropy.local_statistics(logits, targets, 5), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert statistics(logits[:0], targets[:0], 5).shape == (3, 0)


SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99, "swiglu": True}
SCORES = Scores(1 / math.sqrt(12))


def attend(q, k, v, segments=None, window=None, scores=SCORES):
    kernel = invariant_attention.in_key_blocks(invariant_attention.forward, attention_lse.by_rows)
    return kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=0.0)


def heads(tokens, samples=1, dtype=torch.float32, seed=0):
    """q of 4 heads, k and v of 2."""
    shapes = ((4, 12), (2, 12), (2, 8))
    return [numbers(tokens, samples, *shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 70])
def test_attention_of_a_document_is_that_of_the_document_alone(dtype, window):
    """Packed with others, in a batch, behind padding, and token by token against a cache of keys."""
    lengths = (130, 1, 67)
    q, k, v = heads(sum(lengths), samples=2, dtype=dtype)
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    packed = attend(q, k, v, Segments(ids), window)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        for sample in range(2):
            document = [x[part, sample : sample + 1] for x in (q, k, v)]
            alone = attend(*document, window=window)
            assert torch.equal(alone[:, 0], packed[part, sample])
            for place in {0, length // 2, length - 1}:
                cached = [document[0][place : place + 1], *(x[: place + 1] for x in document[1:])]
                assert torch.equal(attend(*cached, window=window)[0, 0], alone[place, 0])
        start += length
    rows = [x[:140].clone() for x in (q, k, v)]
    padded = attend(*rows, Segments((torch.arange(140) >= 10).long().expand(2, -1)), window)
    assert torch.equal(padded[10:], attend(*(x[10:] for x in rows), window=window))


def test_values_that_are_not_finite_stay_in_their_document():
    q, k, v = heads(80)
    ids = (torch.arange(80) >= 30).long().unsqueeze(0)
    expected = attend(q, k, v, Segments(ids))
    k[40], v[50] = float("nan"), float("inf")
    assert torch.equal(attend(q, k, v, Segments(ids))[:30], expected[:30])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_has_values_and_gradients_of_the_reference(window, softcap, packed):
    segments = Segments((torch.arange(90) >= 71).long().expand(2, -1)) if packed else None
    arguments = {"segments": segments, "window": window, "scores": SCORES._replace(softcap=softcap)}
    compare_gradients(
        lambda *qkv: attend(*qkv, **arguments),
        lambda *qkv: attention.unfused(*qkv, **arguments, dropout=0.0),
        [x.requires_grad_() for x in heads(90, samples=2)],
    )


def compare_gradients(function, plain, arguments):
    """Compares values and gradients, and values with and without gradients."""
    results = []
    for candidate in (function, plain):
        out = candidate(*arguments)
        results.append([out, *torch.autograd.grad(out, arguments, numbers(*out.shape, seed=9))])
    torch.testing.assert_close(*results, rtol=TOLERANCE, atol=TOLERANCE)
    with torch.no_grad():
        assert torch.equal(function(*arguments), results[0][0])


def test_a_kernel_that_breaks_the_promise_is_refused(monkeypatch):
    config = ModelConfig(**SHAPE, batch_invariant_mode=True)
    choose_kernels(config, torch.device("cpu"))
    broken = lambda self, x, weight, bias=None: F.linear(x, weight) + len(x)  # noqa: E731
    monkeypatch.setattr(invariant_gemm.InvariantLinear, "output", broken)
    with pytest.raises(ConfigError, match="a product of 32 x 32 gave a token other bits"):
        choose_kernels(config, torch.device("cpu"))


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(choose_invariant.fused, "missing", lambda device: "Triton is not installed")
    kernels = choose_kernels(ModelConfig(**SHAPE), torch.device("cpu"))
    with pytest.raises(ConfigError, match="in Triton, and Triton is not installed"):
        choose_invariant.choose_invariant(
            torch.device("cuda"), kernels.fused, kernels.experts.router, kernels.block_attention, kernels.weight_grad
        )
