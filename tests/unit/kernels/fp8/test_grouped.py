"""FP8 products of experts: each expert's rows as those of a linear layer with its matrix."""

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.kernels import choose_fp8_experts as module
from megatron.kernels.choose_fp8_experts import choose_fp8_experts
from megatron.kernels.ops.assignments import Picked
from megatron.kernels.ops.fp8 import operands
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.grouped import Fp8Grouped, emulated
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.linear import OutputGrad
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices
from tests.unit.kernels.fp8.layer import make_operands

ROWS, E, OUT, IN = 40, 5, 128, 256
RECIPES = ("tensorwise", "delayed", "blockwise")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def draw(case):
    """(values [A, in], weight [E, out, in], gradients [A, out], assignments)"""
    assignments = assign(choices(case, ROWS, E), E)
    count, half = len(assignments.rows), torch.bfloat16
    weight = random(E, OUT, IN, seed=1, scale=0.02, dtype=half)
    return random(count, IN, dtype=half), weight, random(count, OUT, seed=2, scale=1e-4, dtype=half), assignments


@pytest.mark.parametrize("formats", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged"])
def test_equal_a_linear_layer_of_each_expert(case, recipe, formats):
    """These scales are the same for all experts, or of blocks within one."""
    values, weight, grads, assignments = draw(case)
    of = make_operands(recipe, formats, values, weight.flatten(0, 1), grads)
    layer = Fp8Grouped(of, emulated, keep_weight=True)
    found = (
        layer.output(Picked(values, None), weight, assignments),
        layer.input_grad(Picked(grads, None), weight, assignments),
    )
    assert [each.shape for each in found] == [(len(values), OUT), (len(values), IN)]
    start = 0
    for expert, size in enumerate(assignments.sizes):
        rows = slice(start, start + size)
        start += size
        if size:
            kernel = Fp8Linear(of, Emulated(), keep_weight=False)
            expected = (
                kernel.output(values[rows], weight[expert]),
                kernel.input_grad(OutputGrad(grads[rows]), weight[expert]),
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one[rows], other, rtol=2.0**-7, atol=1e-7)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_the_exact_ones(recipe):
    values, weight, grads, assignments = draw("uniform")
    layer = Fp8Grouped(make_operands(recipe, "hybrid", values, weight.flatten(0, 1), grads), emulated, keep_weight=True)
    of = torch.repeat_interleave(torch.arange(E), torch.tensor(assignments.sizes))
    exact = torch.einsum("ai,aoi->ao", values.double(), weight.double()[of])
    exact_grad = torch.einsum("ao,aoi->ai", grads.double(), weight.double()[of])
    for found, expected in (
        (layer.output(Picked(values, None), weight, assignments), exact),
        (layer.input_grad(Picked(grads, None), weight, assignments), exact_grad),
    ):
        error = (found.double() - expected).norm() / expected.norm()
        assert 1e-3 < error < 0.06, "half a step of 3 or 2 bits, over many terms"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ["uniform", "ragged"])
def test_rows_that_are_picked(case, recipe):
    """As copies of them; and each is quantized once."""
    _, weight, _, assignments = draw(case)
    values, grads = (random(ROWS, width, seed=width, dtype=torch.bfloat16) for width in (IN, OUT))
    of, quantized = make_operands(recipe, "hybrid", values, weight.flatten(0, 1), grads), []

    def counted(x, **directions):
        quantized.append(len(x))
        return of.input(x, **directions)

    results = []
    for picked in (lambda x: Picked(x, assignments.rows), lambda x: Picked(x[assignments.rows], None)):
        layer = Fp8Grouped(of._replace(input=counted), emulated, keep_weight=True)
        results.append(
            (layer.output(picked(values), weight, assignments), layer.input_grad(picked(grads), weight, assignments))
        )
    assert quantized == [ROWS, len(assignments.rows)]
    for found, expected in zip(*results, strict=True):
        # The row of the largest magnitude may have no expert.
        torch.testing.assert_close(found, expected, rtol=0, atol=float(0.06 * expected.abs().max()))
        assert recipe == "tensorwise" or found.equal(expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe):
    """The scales of other ranks may need this one's magnitude: zero."""
    values, weight, grads, assignments = draw("none")
    calls = []
    of = make_operands(recipe, "hybrid", torch.ones(1), weight.flatten(0, 1), torch.ones(1))
    if recipe == "tensorwise":
        of = operands.tensorwise(FORMATS["hybrid"], 0, (lambda amax: calls.append(amax.clone()),) * 3)
    layer = Fp8Grouped(of, emulated, keep_weight=True)
    assert layer.output(Picked(values, None), weight, assignments).shape == (0, OUT)
    assert layer.input_grad(Picked(grads, None), weight, assignments).shape == (0, IN)
    if recipe == "tensorwise":
        assert len(calls) == 3 and [float(amax) for amax in calls if not amax] == [0.0, 0.0]


def test_magnitudes_are_raised_in_place():
    values, weight, grads, assignments = draw("uniform")
    state = torch.zeros(3)
    scales, cells = [tuple(each[i : i + 1] for i in range(3)) for each in (torch.ones(3), state)]
    layer = Fp8Grouped(operands.delayed(FORMATS["hybrid"], scales, cells), emulated, keep_weight=True)
    layer.output(Picked(values, None), weight, assignments)
    layer.input_grad(Picked(grads, None), weight, assignments)
    assert state.tolist() == [float(each.abs().max()) for each in (values, weight, grads)]


@pytest.mark.parametrize("keep", [True, False])
def test_the_weight_is_quantized_once_until_it_is_forgotten(keep):
    values, weight, grads, assignments = draw("uniform")
    of, calls = operands.blockwise(FORMATS["e4m3"]), []

    def counted(x, **directions):
        calls.append((tuple(x.shape), *directions.values()))
        return of.weight(x, **directions)

    layer = Fp8Grouped(of._replace(weight=counted), emulated, keep_weight=keep)
    first = layer.output(Picked(values, None), weight, assignments)
    layer.input_grad(Picked(grads, None), weight, assignments)
    flat = (E * OUT, IN)
    assert calls == [(flat, True, True)] if keep else [(flat, True, False), (flat, False, True)]
    assert layer.output(Picked(values, None), weight * 3, assignments).equal(first) == keep
    layer.forget()
    assert not layer.output(Picked(values, None), weight * 3, assignments).equal(first)


class TestChoice:
    MODEL = ModelConfig(num_experts=4, hidden_size=256, moe_ffn_hidden_size=384)

    def choose(self, recipe, device=CUDA, etp=1):
        return choose_fp8_experts(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), self.MODEL, etp, device)

    def test_a_cpu_emulates(self):
        for recipe in RECIPES:
            assert self.choose(recipe, CPU) == (emulated, "emulated in fp32 (the device is cpu)")
        assert self.choose("mxfp8", CPU) == (None, "none (there are no grouped products with mxfp8 scales)")

    def test_a_model_without_experts(self):
        assert choose_fp8_experts(Fp8Config(fp8_format="e4m3"), ModelConfig(), 1, CPU) == (None, "")

    def test_reasons(self, monkeypatch):
        assert "width 192 of a rank's experts are no multiples of 128" in self.choose("blockwise", etp=2).choice
        monkeypatch.setattr(module.fused, "missing", lambda device: "no Triton")
        assert self.choose("delayed", etp=2) == (None, "none (no Triton)")

    def test_a_run_that_is_only_traced(self, monkeypatch):
        """It takes the memory of FP8 experts, and has no numbers to compare."""
        monkeypatch.setattr(module.fused, "only_traced", lambda: True)
        found = self.choose("blockwise")
        assert found.choice == "grouped products in Triton (not tried: the run is only traced)"
        values, weight, _, assignments = (
            each.to("meta") if torch.is_tensor(each) else each for each in draw("uniform")
        )
        layer = Fp8Grouped(operands.blockwise(FORMATS["e4m3"]), found.product, keep_weight=True)
        assert layer.output(Picked(values, None), weight, assignments).shape == (len(values), OUT)
        assert self.choose("blockwise", etp=2).product is None

    def test_a_wrong_kernel_is_left_out(self, monkeypatch):
        def without_the_last(a, picked, b, out, assignments):
            emulated(a, picked, b, out, assignments)
            out[-1].zero_()

        trial = module._try
        monkeypatch.setattr(module.fused, "missing", lambda device: None)
        monkeypatch.setattr(module, "_try", lambda kernel, config, device: trial(kernel, config, CPU))
        for kernel, choice in (
            (emulated, "grouped products in Triton"),
            (without_the_last, "none (its results are wrong)"),
        ):
            monkeypatch.setattr(module, "load", lambda kernel=kernel: kernel)
            for recipe in RECIPES:
                found = self.choose(recipe)
                assert found.choice == choice and found.product is (kernel if kernel is emulated else None)
