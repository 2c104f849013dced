"""FP8 products by Transformer Engine's quantizers and GEMM, computed on the CPU by a package with its signatures.

Its quantizers give the bits of our reference, so products equal the emulated ones.
"""

import importlib

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.kernels import choose_fp8
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.quantize import SEPARATE, amax_of, scale_of
from megatron.kernels.ops.linear import OutputGrad, PlainLinear
from megatron.kernels.transformer_engine import EngineFp8, find_engine
from megatron.training import build_model, setup
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.kernels import transformer_engine_fake as fake
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8.layer import RECIPES, bounds, draw, exact, make_kernel, make_operands, products
from tests.unit.training.test_fp8 import BLOCKWISE, DELAYED

CPU, CUDA, NONE = torch.device("cpu"), torch.device("cuda", 0), (None, None, None)
QUANTIZERS = {
    "delayed": "Float8Quantizer",
    "tensorwise": "Float8CurrentScalingQuantizer",
    "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
}


@pytest.fixture
def calls(monkeypatch):
    return fake.install(monkeypatch)


@pytest.fixture
def fp8(calls):
    return importlib.import_module("megatron.kernels.backends.transformer_engine.fp8")


@pytest.fixture
def tensors():
    return draw(64, 96, 160)


def delayed_state(formats, tensors):
    dtypes = FORMATS[formats].forward, FORMATS[formats].forward, FORMATS[formats].gradient
    scales = tuple(scale_of(amax_of(x), torch.finfo(of).max) for x, of in zip(tensors, dtypes, strict=True))
    return scales, tuple(torch.zeros(1) for _ in range(3))


def made(fp8, recipe, formats, tensors, max_over=NONE, *, keep_weight=True, weight_grad=None):
    state = delayed_state(formats, tensors) if recipe == "delayed" else (None, None)
    return fp8.layer(recipe, FORMATS[formats], CPU, *state, max_over, keep_weight=keep_weight, weight_grad=weight_grad)


def quantized(calls):
    """(rowwise, columnwise) of each operand, by the quantizer's number in the layer."""
    found, numbers = [], {}
    for name, given in calls:
        if name in QUANTIZERS.values():
            number = numbers.setdefault(id(given["quantizer"]), len(numbers))
            found.append((number, given["rowwise_usage"], given["columnwise_usage"]))
    return found


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
class TestProducts:
    def test_equal_the_emulated_ones(self, fp8, calls, recipe, formats, tensors):
        ours = products(make_kernel(recipe, formats, tensors, Emulated()), *tensors)
        theirs = products(made(fp8, recipe, formats, tensors), *tensors)
        for a, b in zip(theirs, ours, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b)
        assert {name for name, _ in calls} == {QUANTIZERS[recipe], "general_gemm"}

    def test_within_the_bound_of_the_recipe(self, fp8, recipe, formats):
        tensors = draw(64, 96, 160, outliers=True)
        found = products(made(fp8, recipe, formats, tensors), *tensors)
        limits = bounds(*tensors, make_operands(recipe, formats, *tensors))
        for a, expected, limit in zip(found, exact(*tensors), limits, strict=True):
            rounding = a.abs().double() * (2.0**-8 if a.dtype == torch.bfloat16 else 2.0**-20)
            assert bool(((a.double() - expected).abs() <= limit * 1.001 + rounding + 1e-30).all())

    def test_rows_that_are_no_multiple(self, fp8, recipe, formats, tensors):
        """Zeros are added, and their products are not returned."""
        x, weight, grad = (each[:37] if number != 1 else each for number, each in enumerate(tensors))
        bias = random(96, dtype=torch.bfloat16, seed=4)
        ours = make_kernel(recipe, formats, (x, weight, grad), Emulated())
        theirs = made(fp8, recipe, formats, (x, weight, grad))
        for a, b in zip(products(theirs, x, weight, grad), products(ours, x, weight, grad), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(theirs.output(x, weight, bias), ours.output(x, weight, bias))

    def test_accumulates_in_the_product(self, fp8, calls, recipe, formats, tensors):
        x, _, grad = tensors
        kernel = made(fp8, recipe, formats, tensors)
        _, _, product = products(kernel, *tensors)
        before = random(96, 160, seed=7)
        main_grad = before.clone()
        calls.clear()
        kernel.weight_grad(main_grad, kernel.prepare(grad, for_weight=True), x, False)
        torch.testing.assert_close(main_grad, before + product)
        (given,) = [given for name, given in calls if name == "general_gemm"]
        assert given["out"] is main_grad and given["accumulate"] is True and given["layout"] == "NT"
        assert given["out_dtype"] == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
class TestWhatIsQuantized:
    def test_once_for_both_products(self, fp8, calls, recipe, tensors):
        """The gradient in both directions, the weight until it is forgotten, the input again for its second product."""
        x, weight, grad = tensors
        kernel = made(fp8, recipe, "hybrid", tensors)
        for _ in range(2):
            out = kernel.output(x, weight)
            prepared = kernel.prepare(grad, for_weight=True)
            kernel.input_grad(prepared, weight)
            kernel.weight_grad(torch.empty(96, 160), prepared, x, True)
        again = recipe in ("delayed", "tensorwise")  # their kernel writes rowwise data in any case
        first = [(0, True, True), (1, True, False), (2, True, True), (1, again, True)]
        assert quantized(calls) == [*first, *first[1:]]
        assert kernel.output(x, weight * 3).equal(out), "kept"
        kernel.forget()
        assert not kernel.output(x, weight * 3).equal(out)

    def test_a_weight_that_is_not_kept(self, fp8, calls, recipe, tensors):
        x, weight, grad = tensors
        kernel = made(fp8, recipe, "hybrid", tensors, keep_weight=False)
        out, grad_x = kernel.output(x, weight), kernel.input_grad(OutputGrad(grad), weight)
        rowwise = recipe != "mxfp8"  # the kernel of squares writes rowwise data, too
        assert quantized(calls) == [(0, True, False), (1, True, False), (0, rowwise, True), (2, True, False)]
        kept = made(fp8, recipe, "hybrid", tensors)
        assert out.equal(kept.output(x, weight)) and grad_x.equal(kept.input_grad(OutputGrad(grad), weight))

    def test_a_gradient_that_was_not_prepared(self, fp8, recipe, tensors):
        x, weight, grad = tensors
        kernel = made(fp8, recipe, "hybrid", tensors)
        _, grad_x, expected = products(kernel, *tensors)
        assert kernel.input_grad(OutputGrad(grad), weight).equal(grad_x)
        of_both, of_rows = (kernel.prepare(grad, for_weight=for_weight) for for_weight in (True, False))
        for unprepared in (OutputGrad(grad), of_rows, of_both.plain):
            main_grad = torch.empty(96, 160)
            kernel.weight_grad(main_grad, unprepared, x, True)
            assert main_grad.equal(expected)

    def test_the_weight_gradient_in_the_activation_dtype(self, fp8, calls, recipe, tensors):
        x, _, grad = tensors
        kernel = made(fp8, recipe, "hybrid", tensors, weight_grad=weight_grad.separate)
        prepared, found, expected = kernel.prepare(grad, for_weight=True), torch.empty(96, 160), torch.empty(96, 160)
        kernel.weight_grad(found, prepared, x, True)
        weight_grad.separate(expected, grad, x, True)
        assert found.equal(expected) and quantized(calls) == [(0, True, False)]

    def test_in_pieces(self, fp8, recipe, tensors):
        x, weight, grad = tensors
        kernel, bias = made(fp8, recipe, "hybrid", tensors), random(96, seed=4, dtype=torch.bfloat16)
        for rows, source, whole in (
            (kernel.output_rows(weight, bias), x, lambda part: kernel.output(part, weight, bias)),
            (kernel.input_grad_rows(weight), grad, lambda part: kernel.input_grad(OutputGrad(part), weight)),
        ):
            out = torch.empty(64, rows.columns, dtype=torch.bfloat16)
            for part in (slice(0, 7), slice(7, 24), slice(24, 64)):
                rows(source[part], out[part])
                torch.testing.assert_close(out[part], whole(source[part]))


def test_the_runs_own_scales(fp8, tensors):
    """Views of one state: read at each use, and magnitudes raised in place over microbatches."""
    x, weight, grad = tensors
    state, magnitudes = torch.tensor([4.0, 64.0, 2.0**20]), torch.zeros(3)
    scales, amaxes = (tuple(each[i : i + 1] for i in range(3)) for each in (state, magnitudes))
    kernel = fp8.layer("delayed", FORMATS["e4m3"], CPU, scales, amaxes, NONE, keep_weight=False, weight_grad=None)
    products(kernel, x, weight, grad)
    assert magnitudes.tolist() == [float(each.abs().max()) for each in tensors]
    kernel.output(x * 0.5, weight)
    assert magnitudes[0] == float(x.abs().max())
    before = kernel.output(x, weight)
    state[0] = 1e6  # x saturates
    assert not kernel.output(x, weight).equal(before)


class TestMagnitudesOverRanks:
    def test_of_cut_operands(self, fp8, calls, tensors):
        """Each rank scales its part as the whole is scaled; a part that is not cut communicates nothing."""
        whole = float(tensors[0].abs().max()) * 3
        seen = []

        def over(amax):
            seen.append(float(amax))
            amax.fill_(whole)

        kernel = made(fp8, "tensorwise", "hybrid", tensors, (over, None, None))
        products(kernel, *tensors)
        assert seen == [float(tensors[0].abs().max())] * 2, "the input, in forward and for the weight's gradient"
        inputs = [each for name, each in calls if name == QUANTIZERS["tensorwise"] and each["use_existing_amax"]]
        assert len(inputs) == 2 and all(float(each["amax"]) == whole for each in inputs)

    def test_pieces_do_not_communicate(self, fp8, tensors):
        over = (lambda amax: pytest.fail("communicates"),) * 3
        kernel = made(fp8, "tensorwise", "hybrid", tensors, (over[0], None, over[2]))
        x, weight, grad = tensors
        kernel.output_rows(weight)(x, torch.empty(64, 96, dtype=torch.bfloat16))
        kernel.input_grad_rows(weight)(grad, torch.empty(64, 160, dtype=torch.bfloat16))


def test_what_the_package_says_of_the_gpu(fp8):
    assert [fp8.why_not(recipe) for recipe in RECIPES] == [None] * 4
    fake.NONE.update({"blockwise", "mxfp8"})
    assert fp8.why_not("blockwise") == "blockwise requires another GPU" and fp8.why_not("tensorwise") is None
    assert fp8.why_not("mxfp8") == "mxfp8 requires another GPU" and fp8.why_not("delayed") is None


def test_scales_of_gemms_are_in_their_order(fp8, calls, tensors):
    """As in Transformer Engine's own layers: of activations and gradients, under MXFP8."""
    products(made(fp8, "mxfp8", "e4m3", tensors), *tensors)  # quantizes the gradient, input, weight and input
    assert [each["optimize_for_gemm"] for name, each in calls if name == "MXFP8Quantizer"] == [True, True, False, True]


class TestChosen:
    @pytest.fixture
    def engine(self, calls, monkeypatch):
        """The engine, whose trial and torch's for a GPU run here."""
        trial = choose_fp8._try_engine
        monkeypatch.setattr(choose_fp8, "_try_engine", lambda engine, config, device: trial(engine, config, CPU))
        monkeypatch.setattr(choose_fp8.scaled_mm, "why_not", lambda recipe, device, formats: None)
        monkeypatch.setattr(choose_fp8, "choose_quantize", lambda device: (SEPARATE, None))
        monkeypatch.setattr(choose_fp8, "choose_sums", lambda config, device: (None, None))
        return find_engine("transformer_engine", CUDA)[0]

    def choose(self, engine, recipe, formats="hybrid"):
        return choose_fp8.choose_fp8(Fp8Config(fp8_format=formats, fp8_recipe=recipe), CUDA, {}, engine)

    @pytest.mark.parametrize("formats", FORMATS)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_every_recipe(self, engine, recipe, formats):
        found = self.choose(engine, recipe, formats)
        assert found.engine is engine.fp8 and found.choice == "Transformer Engine's products"

    def test_not_asked_for(self, engine):
        assert self.choose(None, "blockwise")[2:] == ("torch's scaled products", None)

    def test_torch_takes_what_it_lacks(self, engine):
        fake.NONE.add("blockwise")
        why = "(Transformer Engine's not: blockwise requires another GPU)"
        assert self.choose(engine, "blockwise")[2:] == (f"torch's scaled products {why}", None)
        assert self.choose(engine, "delayed").engine is engine.fp8

    def test_one_that_is_wrong_is_left_out(self, engine):
        """Products in bf16 are noticed, too: they lack the rounding of FP8."""

        def of_bf16(*args, **options):
            return PlainLinear(weight_grad.separate)

        def without_addition(*args, **options):
            kernel = engine.fp8.layer(*args, **options)
            write = kernel.weight_grad
            kernel.weight_grad = lambda main_grad, grad, x, overwrite: write(main_grad, grad, x, True)
            return kernel

        for wrong in (of_bf16, without_addition):
            found = self.choose(engine._replace(fp8=engine.fp8._replace(layer=wrong)), "tensorwise")
            assert found[2:] == ("torch's scaled products (Transformer Engine's not: its results are wrong)", None)


@pytest.mark.parametrize("fields", [DELAYED, BLOCKWISE, {**BLOCKWISE, "fp8_recipe": "tensorwise"}])
def test_a_run_trains_as_with_emulated_products(fp8, calls, monkeypatch, fields):
    """Scales, magnitudes and kept weights are those of the run; the first step of `delayed` only measures."""
    results = []
    for engine in (None, EngineFp8(fp8.layer, fp8.why_not)):
        chosen = choose_fp8.Fp8Kernels(Emulated(), SEPARATE, "", engine)
        monkeypatch.setattr(build_model, "choose_fp8", lambda *args, chosen=chosen: chosen)
        trainer = setup.build(make_run(**fields), pool.groups(), CPU)
        losses = [trainer.train_step().loss for _ in range(4)]
        scales = trainer.step.features.fp8.scales
        histories = {} if scales is None else {name: each.clone() for name, each in scales.histories().items()}
        results.append((losses, histories, {name for name, _ in calls}))
    (expected, of_ours, none), (losses, of_theirs, used) = results
    assert none == set() and used == {QUANTIZERS[fields.get("fp8_recipe", "delayed")], "general_gemm"}
    assert losses == pytest.approx(expected, rel=2e-3)
    assert losses[-1] < losses[0]
    for name, history in of_ours.items():
        torch.testing.assert_close(of_theirs[name], history, rtol=0.1, atol=1e-6)
