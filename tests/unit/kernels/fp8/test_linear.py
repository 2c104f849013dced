"""The FP8 products of a layer: what is quantized, when, and what is kept."""

import pytest
import torch

from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.fp8 import operands, quantize
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import E4M3, FORMATS
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.fp8.operands import Operands
from megatron.kernels.ops.linear import OutputGrad
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8.layer import RECIPES, bounds, draw, exact, make_kernel, make_operands, products


class Counted:
    """An operand that notes which directions are asked for."""

    def __init__(self, operand, name, calls):
        self.operand, self.name, self.calls = operand, name, calls

    def __call__(self, x, *, rows, columns):
        self.calls.append((self.name, rows, columns))
        return self.operand(x, rows=rows, columns=columns)

    def in_pieces(self):
        return Counted(self.operand.in_pieces(), f"{self.name} in pieces", self.calls)


def counted(recipe, tensors, **options):
    """A layer's kernel, and the list of what it quantizes."""
    calls = []
    of = make_operands(recipe, "hybrid", *tensors)
    named = Operands(*(Counted(one, name, calls) for one, name in zip(of, Operands._fields, strict=True)))
    return Fp8Linear(named, Emulated(), **options), calls


@pytest.fixture
def tensors():
    return draw(40, 48, 136)


@pytest.mark.parametrize("recipe", RECIPES)
class TestEveryRecipe:
    def test_leading_dims(self, recipe, tensors):
        x, weight, grad = tensors
        flat = make_kernel(recipe, "hybrid", tensors, Emulated())
        shaped = make_kernel(recipe, "hybrid", tensors, Emulated())
        found = products(shaped, x.view(5, 8, -1), weight, grad.view(5, 8, -1))
        assert [each.shape for each in found] == [(5, 8, 48), (5, 8, 136), (48, 136)]
        for one, expected in zip(found, products(flat, x, weight, grad), strict=True):
            assert one.flatten(0, -2).equal(expected)

    def test_a_gradient_that_was_not_prepared(self, recipe, tensors):
        """As of a weight gradient that is computed later, and of a layer whose input needs none."""
        x, weight, grad = tensors
        kernel = make_kernel(recipe, "hybrid", tensors, Emulated())
        _, grad_x, expected = products(kernel, x, weight, grad)
        assert kernel.input_grad(OutputGrad(grad), weight).equal(grad_x)
        of_both, of_rows = (kernel.prepare(grad, for_weight=for_weight) for for_weight in (True, False))
        for unprepared in (OutputGrad(grad), of_rows, of_both.plain):
            main_grad = torch.empty(48, 136)
            kernel.weight_grad(main_grad, unprepared, x, True)
            assert main_grad.equal(expected)

    def test_accumulates_in_fp32(self, recipe, tensors):
        x, weight, grad = tensors
        kernel = make_kernel(recipe, "hybrid", tensors, Emulated())
        product = products(kernel, x, weight, grad)[2]
        before = random(48, 136, seed=7)
        main_grad = before.clone()
        kernel.weight_grad(main_grad, kernel.prepare(grad, for_weight=True), x, False)
        assert main_grad.equal(before + product)

    def test_the_host_reads_nothing(self, recipe, tensors):
        """Tensors without memory have nothing to read."""
        tensors = [each.to("meta") for each in tensors]
        products(make_kernel(recipe, "hybrid", tensors, Emulated()), *tensors)

    def test_the_weight_is_quantized_once_until_it_is_forgotten(self, recipe, tensors):
        kernel, calls = counted(recipe, tensors, keep_weight=True)
        first, _ = (products(kernel, *tensors) for _ in range(2))
        assert [call for call in calls if call[0] == "weight"] == [("weight", True, True)]
        assert [call for call in calls if call[0] == "gradient"] == [("gradient", True, True)] * 2
        x, weight, _ = tensors
        assert kernel.output(x, weight * 3).equal(first[0]), "kept"
        kernel.forget()
        assert not kernel.output(x, weight * 3).equal(first[0])

    def test_a_weight_that_is_not_kept(self, recipe, tensors):
        """It is quantized at each use, in the direction of the product."""
        kernel, calls = counted(recipe, tensors, keep_weight=False)
        x, weight, _ = tensors
        once = products(kernel, *tensors)
        assert [call for call in calls if call[0] == "weight"] == [("weight", True, False), ("weight", False, True)]
        kept, _ = counted(recipe, tensors, keep_weight=True)
        assert all(a.equal(b) for a, b in zip(once, products(kept, *tensors), strict=True))
        assert not kernel.output(x, weight * 3).equal(once[0])

    def test_the_weight_gradient_in_the_activation_dtype(self, recipe, tensors):
        """Nothing is quantized for it."""
        x, weight, grad = tensors
        kernel, calls = counted(recipe, tensors, keep_weight=True, weight_grad=weight_grad.separate)
        _, _, found = products(kernel, x, weight, grad)
        expected = torch.empty(48, 136)
        weight_grad.separate(expected, grad, x, True)
        assert found.equal(expected) and found.equal(found.bfloat16().float())
        assert ("gradient", True, False) in calls and ("input", False, True) not in calls


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("biased", [False, True])
def test_pieces_equal_the_whole(recipe, biased, tensors):
    x, weight, grad = tensors
    kernel = make_kernel(recipe, "hybrid", tensors, Emulated())
    bias = random(48, seed=4, dtype=torch.bfloat16) if biased else None
    for rows, source, expected in (
        (kernel.output_rows(weight, bias), x, kernel.output(x, weight, bias)),
        (kernel.input_grad_rows(weight), grad, kernel.input_grad(OutputGrad(grad), weight)),
    ):
        out = torch.empty(40, rows.columns, dtype=torch.bfloat16)
        assert out.shape == expected.shape
        for part in (slice(0, 7), slice(7, 24), slice(24, 40)):
            rows(source[part], out[part])
        # BLAS takes another order of sums for fewer rows.
        torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=1e-7)


def test_tensorwise_scales_a_piece_by_itself(tensors):
    x, weight, _ = tensors
    kernel, calls = counted("tensorwise", tensors, keep_weight=True)
    rows, out = kernel.output_rows(weight), torch.empty(8, 48, dtype=torch.bfloat16)
    rows(x[:8], out)
    assert calls[-1] == ("input in pieces", True, False)
    assert out.equal(kernel.output(x[:8], weight))


class TestDelayed:
    def test_magnitudes_are_raised_in_place(self, tensors):
        x, weight, grad = tensors
        state = torch.zeros(3)
        cells = tuple(state[i : i + 1] for i in range(3))
        scales = tuple(torch.full((1,), value) for value in (4.0, 64.0, 2.0**20))
        kernel = Fp8Linear(operands.delayed(FORMATS["hybrid"], scales, cells), Emulated(), keep_weight=True)
        state[0] = 1e-3
        products(kernel, x, weight, grad)
        assert state.tolist() == [float(each.abs().max()) for each in tensors]
        kernel.output(x * 0.5, weight)
        assert state[0] == float(x.abs().max()), "the largest of all microbatches"
        kernel.output(x * 2.0, weight)
        assert state[0] == 2.0 * float(x.abs().max())
        kernel.prepare(grad * float("nan"), for_weight=False)
        assert state[2].isnan()

    def test_the_given_scales_are_used(self, tensors):
        """Much too large for the input: it saturates."""
        weight = tensors[1]
        x = torch.where(tensors[0] > 0, 0.5, -0.25).bfloat16()
        scales = tuple(torch.full((1,), value) for value in (1e6, 1000.0, 2.0**20))
        of = operands.delayed(FORMATS["hybrid"], scales, tuple(torch.zeros(1) for _ in range(3)))
        out = Fp8Linear(of, Emulated(), keep_weight=False).output(x, weight)
        saturated = x.float().sign() * 448e-6
        values = quantize.dequantize(of.weight(weight, rows=True, columns=False).rows)
        torch.testing.assert_close(out.float(), saturated @ values.t(), rtol=2.0**-7, atol=1e-8)


class TestTensorwise:
    def test_parts_get_the_scale_of_the_whole(self):
        """Two ranks hold halves of the operand, and agree on its magnitude."""
        x, amaxes = random(16, 64), []
        whole = operands.Tensorwise(E4M3)(x, rows=True, columns=True)
        largest = x.abs().max().view(1)

        def max_over(amax):
            amaxes.append(amax.clone())
            amax.copy_(largest)

        for part in (slice(0, 32), slice(32, 64)):
            both = operands.Tensorwise(E4M3, 0, max_over)(x[:, part], rows=True, columns=True)
            assert both.rows.data.float().equal(whole.rows.data.float()[:, part])
            assert both.columns.data.float().equal(whole.columns.data.float()[part])
            assert both.rows.inverse.equal(whole.rows.inverse)
        assert [float(each) for each in amaxes] == [float(x[:, :32].abs().max()), float(x[:, 32:].abs().max())]

    def test_pieces_do_not_communicate(self):
        operand = operands.Tensorwise(E4M3, 0, max_over=lambda amax: pytest.fail("communicates")).in_pieces()
        assert operand(random(4, 8), rows=True, columns=False).rows is not None

    def test_margin(self):
        x = random(4, 8)
        plain, halved = (operands.Tensorwise(E4M3, margin)(x, rows=True, columns=False).rows for margin in (0, 2))
        assert halved.inverse.equal(plain.inverse * 4) and float(halved.data.float().abs().max()) == 112.0

    def test_only_operands_that_are_cut_communicate(self, tensors):
        calls = []
        over = (calls.append, None, None)
        kernel = Fp8Linear(operands.tensorwise(FORMATS["e4m3"], 0, over), Emulated(), keep_weight=True)
        products(kernel, *tensors)
        assert len(calls) == 2, "the input, in forward and for the weight's gradient"


def test_odd_sizes():
    """No size is a multiple of anything; the emulation takes them all."""
    for recipe in RECIPES:
        for n, out, into in ((1, 1, 1), (3, 129, 5), (131, 7, 257)):
            tensors = draw(n, out, into, dtype=torch.float32)
            found = products(make_kernel(recipe, "hybrid", tensors, Emulated()), *tensors)
            limits = bounds(*tensors, make_operands(recipe, "hybrid", *tensors))
            for one, expected, limit in zip(found, exact(*tensors), limits, strict=True):
                assert ((one.double() - expected).abs() <= limit + 1e-6 * expected.abs().max()).all()
