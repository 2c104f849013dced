"""The three products in FP8 against fp64, and torch's products against the emulation."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.kernels.ops.fp8 import quantize, scaled_mm
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import E4M3
from megatron.kernels.ops.fp8.scaled_mm import ScaledMM
from megatron.training.dry_run.simulated_torch import SimulatedTorch
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8.layer import (
    RECIPES,
    bounds,
    draw,
    exact,
    make_kernel,
    make_operands,
    products,
    relative,
)

CPU = torch.device("cpu")
FORMATS = ("e4m3", "hybrid")
# Rounding to the output's dtype, and sums in fp32, relative to the largest element.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
# The rounding error of an element is uniform within half a step, 2^-4 to 2^-5 of an e4m3 number: 0.027 of it in the
# root of the mean square over normal random numbers, and twice as much for e5m2. Both operands have one: sqrt(0.027^2 +
# 0.027^2), or sqrt(0.027^2 + 0.053^2). MXFP8 clamps the largest elements, too.
TYPICAL = {
    ("e4m3", False): (0.040, 0.040, 0.040),
    ("hybrid", False): (0.040, 0.062, 0.062),
    ("e4m3", True): (0.046, 0.046, 0.046),
    ("hybrid", True): (0.046, 0.066, 0.066),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("formats", FORMATS)
class TestErrors:
    @pytest.mark.parametrize("outliers", [False, True])
    @pytest.mark.parametrize(("sizes", "dtype"), [((256, 128, 384), torch.bfloat16), ((37, 50, 141), torch.float32)])
    def test_every_element_is_within_the_bound(self, sizes, dtype, outliers, formats, recipe):
        tensors = draw(*sizes, dtype=dtype, outliers=outliers)
        limits = bounds(*tensors, make_operands(recipe, formats, *tensors))
        found = products(make_kernel(recipe, formats, tensors, Emulated()), *tensors)
        for one, expected, limit in zip(found, exact(*tensors), limits, strict=True):
            assert not one.isnan().any()
            rounding = ROUNDING[one.dtype] * expected.abs().max()
            assert ((one.double() - expected).abs() <= limit + rounding).all()

    def test_all_elements_together(self, formats, recipe):
        tensors = draw(256, 256, 256)
        found = products(make_kernel(recipe, formats, tensors, Emulated()), *tensors)
        for one, expected, limit in zip(found, exact(*tensors), TYPICAL[formats, recipe == "mxfp8"], strict=True):
            assert 0.5 * limit < relative(one, expected) < limit


def test_blocks_keep_outliers_from_the_other_elements():
    """The median error of the weight's gradient: one scale leaves most elements few of the format's numbers."""
    tensors = draw(256, 384, 512, outliers=True)
    expected = exact(*tensors)[2]
    medians = {}
    for recipe in ("tensorwise", "blockwise"):
        found = products(make_kernel(recipe, "e4m3", tensors, Emulated()), *tensors)[2]
        medians[recipe] = float((found.double() - expected).abs().median() / expected.abs().median())
    assert medians["blockwise"] < 0.1 * medians["tensorwise"]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
class TestTorchOnTheCpu:
    @pytest.mark.filterwarnings("ignore:TF32")  # of the switch
    def test_equals_the_emulation(self, dtype, formats, recipe):
        """To the last bit. oneDNN sums in another order where a CPU has matrix instructions."""
        tensors = draw(64, 48, 160, dtype=dtype)
        bias = random(48, seed=5, scale=0.1).to(dtype)
        with torch.backends.mkldnn.flags(enabled=False):
            ours, theirs = (make_kernel(recipe, formats, tensors, each) for each in (Emulated(), ScaledMM(recipe)))
            for found, expected in zip(products(theirs, *tensors), products(ours, *tensors), strict=True):
                assert found.equal(expected) and found.dtype == expected.dtype
            assert theirs.output(*tensors[:2], bias).equal(ours.output(*tensors[:2], bias))

    def test_any_number_of_tokens(self, dtype, formats, recipe):
        """Rows of zeros are added, and sums may have another order."""
        tensors = draw(37, 48, 160, dtype=dtype)
        ours, theirs = (make_kernel(recipe, formats, tensors, each) for each in (Emulated(), ScaledMM(recipe)))
        for found, expected in zip(products(theirs, *tensors), products(ours, *tensors), strict=True):
            assert found.shape == expected.shape
            limit = ROUNDING[found.dtype] * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0.0, atol=limit)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("formats", FORMATS)
def test_cuda_would_take_the_operands(monkeypatch, recipe, formats):
    """torch's own checks of shapes, strides and scales, for tensors on CUDA that have no memory; 37 tokens."""
    checked = []

    def check(name):
        function = getattr(torch.ops.aten, name).default

        def checks(*args, out, **options):
            found = function(*args, **options)
            assert (found.shape, found.dtype, found.device) == (
                out.shape,
                out.dtype,
                out.device,
            ) and out.is_contiguous()
            checked.append(options.get("use_fast_accum", False))

        monkeypatch.setattr(torch, name, checks)

    check("_scaled_mm")
    check("_scaled_mm_v2")
    with SimulatedTorch(), FakeTensorMode():
        x, weight, grad = (
            torch.empty(*sizes, dtype=torch.bfloat16, device="cuda") for sizes in ((37, 512), (384, 512), (37, 384))
        )
        kernel = make_kernel(recipe, formats, (x, weight, grad), ScaledMM(recipe))
        products(kernel, x, weight, grad)
        rows = kernel.output_rows(weight)
        rows(x.narrow(0, 0, 16), torch.empty(16, 384, dtype=torch.bfloat16, device="cuda"))
    # The gradient of the weight, the output, the gradient of the input, and a piece of the output.
    assert checked == ([False, True, False, True] if recipe in ("tensorwise", "delayed") else [False] * 4)


def test_factors_are_in_the_order_of_the_gpu():
    """MXFP8: the factor of row i and block j of the contraction, by cuBLAS's formula."""
    m, n = 300, 6
    factors = torch.arange(m * n).remainder(251).to(torch.uint8).view(m, n)
    found = scaled_mm.swizzled(factors.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert found.shape == (384 * 8,)
    for i, j in ((0, 0), (1, 0), (31, 3), (32, 0), (100, 5), (128, 1), (299, 5), (255, 2)):
        tile = (i // 128) * 2 + j // 4
        assert found[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] == factors[i, j]
    assert found.view(3, 2, 32, 4, 4)[2, :, 12:, 1].eq(0).all()  # rows from 300 on


def test_factors_of_squares_and_vectors_have_the_strides_of_the_gpu():
    product, x = ScaledMM("blockwise"), random(256, 640)
    square = product.ready(quantize.per_block(x, quantize.SQUARE, E4M3, rows=True, columns=False).rows).inverse
    assert (square.shape, square.stride()) == ((8, 2), (1, 8))
    vector = product.ready(quantize.per_block(x, quantize.VECTOR, E4M3, rows=True, columns=False).rows).inverse
    assert (vector.shape, vector.stride()) == ((256, 5), (1, 256))


class TestWhyNot:
    def test_sizes(self):
        assert scaled_mm.size_problem("decoder.layers.0.mlp.fc1", 48, 160, "delayed") is None
        message = scaled_mm.size_problem("decoder.layers.0.mlp.fc1", 48, 160, "mxfp8")
        assert message == (
            "decoder.layers.0.mlp.fc1: its weight is [48, 160] on a rank, and mxfp8 FP8 needs multiples of 32"
        )
        assert "multiples of 16" in scaled_mm.size_problem("fc1", 64, 24, "delayed")
        assert "multiples of 128" in scaled_mm.size_problem("fc1", 64, 256, "blockwise")

    def test_the_cpu(self):
        assert (
            scaled_mm.why_not("delayed", CPU, "hybrid") is None
            and scaled_mm.why_not("tensorwise", CPU, "hybrid") is None
        )
        assert scaled_mm.why_not("blockwise", CPU, "hybrid") == "torch multiplies blockwise FP8 on CUDA only"
        assert scaled_mm.why_not("mxfp8", CPU, "hybrid") == "torch multiplies mxfp8 FP8 on CUDA only"

    @pytest.mark.parametrize(
        ("recipe", "capability", "reason"),
        [
            ("delayed", (8, 0), "FP8 needs a GPU of compute capability 8.9 or more, Card has 8.0"),
            ("delayed", (8, 9), None),
            ("blockwise", (8, 9), "blockwise needs a GPU of compute capability 9.0, Card has 8.9"),
            ("blockwise", (9, 0), None),
            ("blockwise", (10, 0), "blockwise needs a GPU of compute capability 9.0, Card has 10.0"),
            ("mxfp8", (9, 0), "mxfp8 needs a GPU of compute capability 10.0 or more, Card has 9.0"),
            ("mxfp8", (10, 0), None),
        ],
    )
    def test_gpus(self, monkeypatch, recipe, capability, reason):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
        monkeypatch.setattr(scaled_mm, "_try", lambda recipe, device, formats: None)
        assert scaled_mm.why_not(recipe, torch.device("cuda", 0), "e4m3") == reason

    def test_products_that_fail_or_are_wrong(self, monkeypatch):
        def broken(*args, **options):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

        monkeypatch.setattr(torch, "_scaled_mm", broken)
        expected = f"torch {torch.__version__} cannot multiply delayed FP8 here: CUBLAS_STATUS_NOT_SUPPORTED"
        assert scaled_mm.why_not("delayed", CPU, "hybrid") == expected
        monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *scales, out, **options: out.fill_(0.0))
        assert scaled_mm.why_not("delayed", CPU, "hybrid").endswith("the products are wrong")
