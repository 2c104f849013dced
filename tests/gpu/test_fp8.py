"""FP8 on a GPU: the Triton kernels against the reference's bits, and torch's products against the emulation."""

import importlib.util

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.kernels import choose_fp8_experts, choose_quantize
from megatron.kernels.choose_fp8 import choose_sums
from megatron.kernels.ops.assignments import Assignments, Picked
from megatron.kernels.ops.fp8 import quantize
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import E4M3, E5M2
from megatron.kernels.ops.fp8.grouped import Fp8Grouped, emulated
from megatron.kernels.ops.fp8.scaled_mm import ScaledMM, why_not
from tests.gpu.cuda import CPU, CUDA, NEEDS_CUDA
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices
from tests.unit.kernels.fp8.layer import RECIPES, bounds, draw, exact, make_kernel, make_operands, products

pytestmark = NEEDS_CUDA
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BLOCKS = [quantize.VECTOR, quantize.SQUARE, quantize.MICRO]
BOTH = {"rows": True, "columns": True}
# Of the largest element: Hopper sums with about 14 bits, and both products are rounded to bf16.
PRECISION = 2.0**-7


def bits(x):
    """Bytes of FP8 numbers; the sign of NaN does not count."""
    return torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8)).cpu()


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.data.is_contiguous() and a.inverse.dtype == b.inverse.dtype
        assert bits(a.data).equal(bits(b.data)) and a.inverse.float().cpu().equal(b.inverse.float().cpu())


def difficult(m, k, dtype):
    """Magnitudes over many powers of two, with zeros and numbers that are not finite."""
    x = random(m, k) * torch.exp2(random(m, k, seed=1, scale=4.0).round())
    x.view(-1)[::7] = 0.0
    x.view(-1)[3::1001] = float("inf")
    x.view(-1)[4::1003] = float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("of", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
class TestBits:
    """The CPU's bits, for which tests/unit/kernels/fp8 has numpy's."""

    @pytest.mark.parametrize("shape", [(1000, 528), (1024, 1024), (5, 7)])
    def test_plain_torch(self, shape, dtype, of):
        x, scale = difficult(*shape, dtype), torch.tensor([0.37])
        for block in BLOCKS:
            expected = quantize.per_block(x, block, of, **BOTH)
            assert_same_bits(quantize.per_block(x.to(CUDA), block, of, **BOTH), expected)
        expected = quantize.per_tensor(x, scale, of, **BOTH)
        assert_same_bits(quantize.per_tensor(x.to(CUDA), scale.to(CUDA), of, **BOTH), expected)

    @NEEDS_TRITON
    @pytest.mark.parametrize("shape", [(1000, 528), (1024, 1024), (5, 7)])
    def test_triton(self, shape, dtype, of):
        kernels, x, scale = choose_quantize.load(), difficult(*shape, dtype), torch.tensor([0.37])
        for block in BLOCKS:
            expected = quantize.per_block(x, block, of, **BOTH)
            assert_same_bits(kernels.per_block(x.to(CUDA), block, of, **BOTH), expected)
        amax, found_amax = torch.zeros(1), torch.zeros(1, device=CUDA)
        x = x.nan_to_num(0.0, 0.0, 0.0)
        expected = quantize.per_tensor(x, scale, of, **BOTH, amax=amax)
        assert_same_bits(kernels.per_tensor(x.to(CUDA), scale.to(CUDA), of, **BOTH, amax=found_amax), expected)
        assert found_amax.cpu().equal(amax)
        for y in (x, x * 0.0, difficult(*shape, dtype)):
            expected = quantize.by_amaxes(y, quantize.amax_of(y), of, 1, **BOTH)
            y = y.to(CUDA)
            assert_same_bits(kernels.by_amaxes(y, kernels.amaxes(y), of, 1, **BOTH), expected)


@NEEDS_TRITON
def test_triton_is_chosen():
    kernels, why = choose_quantize.choose_quantize(CUDA)
    assert why is None and kernels == choose_quantize.load()


@pytest.mark.parametrize("tokens", [512, 500])
@pytest.mark.parametrize("formats", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", RECIPES)
class TestProducts:
    @pytest.fixture(autouse=True)
    def supported(self, recipe, formats):
        reason = why_not(recipe, CUDA, formats)
        if reason is not None:
            pytest.skip(reason)

    def test_equal_the_emulation(self, recipe, formats, tokens):
        """The same quantized numbers, so only the precision of sums and the last rounding differ."""
        tensors = [each.to(CUDA) for each in draw(tokens, 384, 640)]
        ours, theirs = (make_kernel(recipe, formats, tensors, each) for each in (Emulated(), ScaledMM(recipe)))
        for found, expected in zip(products(theirs, *tensors), products(ours, *tensors), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert float((found - expected).abs().max()) <= PRECISION * float(expected.abs().max())

    def test_are_within_the_bound(self, recipe, formats, tokens):
        tensors = draw(tokens, 384, 640, outliers=True)
        on_gpu = [each.to(CUDA) for each in tensors]
        found = products(make_kernel(recipe, formats, on_gpu, ScaledMM(recipe)), *on_gpu)
        limits = bounds(*tensors, make_operands(recipe, formats, *tensors))
        for one, expected, limit in zip(found, exact(*tensors), limits, strict=True):
            rounding = PRECISION * expected.abs().max()
            assert ((one.to(CPU).double() - expected).abs() <= limit + rounding).all()

    def test_bias_and_pieces(self, recipe, formats, tokens):
        """Pieces have an odd number of rows."""
        x, weight, _ = (each.to(CUDA) for each in draw(tokens, 384, 640))
        bias = random(384, dtype=torch.bfloat16).to(CUDA)
        kernel = make_kernel(recipe, formats, (x, weight, x), ScaledMM(recipe))
        whole, rows = kernel.output(x, weight, bias), kernel.output_rows(weight, bias)
        out = torch.empty_like(whole)
        for part in (slice(0, 100), slice(100, 133), slice(133, tokens)):
            rows(x[part], out[part])
        limit = PRECISION if recipe != "tensorwise" else 0.1  # there, a piece has a scale of its own
        assert float((out - whole).abs().max()) <= limit * float(whole.abs().max())

    def test_accumulates(self, recipe, formats, tokens):
        x, weight, grad = (each.to(CUDA) for each in draw(tokens, 384, 640))
        kernel = make_kernel(recipe, formats, (x, weight, grad), ScaledMM(recipe))
        product = products(kernel, x, weight, grad)[2]
        main_grad = torch.ones_like(product)
        kernel.weight_grad(main_grad, kernel.prepare(grad, for_weight=True), x, False)
        assert main_grad.equal(1.0 + product)

    def test_accumulates_in_the_product(self, recipe, formats, tokens):
        """cuBLASLt adds what torch's product is, up to the order of its sums; at any place in a bucket."""
        x, weight, grad = (each.to(CUDA) for each in draw(tokens, 384, 640))
        config = Fp8Config(fp8_format=formats, fp8_recipe=recipe)
        add, why = choose_sums(config, CUDA)
        assert add is not None, why
        kernel = make_kernel(recipe, formats, (x, weight, grad), ScaledMM(recipe, add))
        product = products(kernel, x, weight, grad)[2]
        bucket = torch.ones(640 * 384 + 64, device=CUDA)
        for start in (0, 4, 32):  # 16 bytes are the least that cuBLASLt takes
            main_grad = bucket[start : start + 640 * 384].view(384, 640).fill_(1.0)
            kernel.weight_grad(main_grad, kernel.prepare(grad, for_weight=True), x, False)
            assert float((main_grad - 1.0 - product).abs().max()) <= PRECISION * float(product.abs().max()) + 2.0**-22


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_host_read(recipe):
    """With delayed and tensorwise scales, too."""
    reason = why_not(recipe, CUDA, "hybrid")
    if reason is not None:
        pytest.skip(reason)
    tensors = [each.to(CUDA) for each in draw(256, 384, 640)]
    kernel = make_kernel(recipe, "hybrid", tensors, ScaledMM(recipe))
    products(kernel, *tensors)  # Triton and cuBLAS set up here
    kernel.forget()
    torch.cuda.set_sync_debug_mode("error")
    try:
        products(kernel, *tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_TRITON
@pytest.mark.parametrize("formats", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
class TestExperts:
    EXPERTS = 8

    @pytest.fixture(autouse=True)
    def supported(self, recipe, formats):
        reason = why_not(recipe, CUDA, formats)
        if reason is not None:
            pytest.skip(reason)

    def assignments(self, case):
        given = assign(choices(case, 700, self.EXPERTS), self.EXPERTS)
        return Assignments(given.rows.to(CUDA), given.ends.to(CUDA), given.sizes)

    @pytest.mark.parametrize("case", ["uniform", "skew", "all", "ragged", "none"])
    @pytest.mark.parametrize(("outputs", "inputs"), [(1536, 2048), (2048, 768)])
    def test_equal_the_emulation(self, recipe, formats, outputs, inputs, case):
        """Experts of no row, of one, and of several tiles. Only the precision of sums and the last rounding differ."""
        assignments = self.assignments(case)
        count = len(assignments.rows)
        half = torch.bfloat16
        values, grads = (
            random(count, inputs, dtype=half).to(CUDA),
            random(700, outputs, scale=1e-4, dtype=half).to(CUDA),
        )
        weight = random(self.EXPERTS, outputs, inputs, seed=1, scale=0.02, dtype=half).to(CUDA)
        one = torch.ones(1, device=CUDA)
        given = (values, weight.flatten(0, 1), grads) if count else (one, one, one)
        results = []
        for product in (choose_fp8_experts.load(), emulated):
            layer = Fp8Grouped(make_operands(recipe, formats, *given), product, keep_weight=True)
            results.append(
                (
                    layer.output(Picked(values, None), weight, assignments),
                    layer.input_grad(Picked(grads, assignments.rows), weight, assignments),
                )
            )
        for found, expected in zip(*results, strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if count:
                assert float((found - expected).abs().max()) <= PRECISION * float(expected.abs().max())

    def test_the_kernel_is_chosen(self, recipe, formats):
        model = ModelConfig(num_experts=self.EXPERTS, hidden_size=2048, moe_ffn_hidden_size=768)
        found = choose_fp8_experts.choose_fp8_experts(Fp8Config(fp8_format=formats, fp8_recipe=recipe), model, 1, CUDA)
        assert found.choice == "grouped products in Triton"

    def test_two_runs_have_the_same_bits(self, recipe, formats):
        assignments = self.assignments("uniform")
        values = random(len(assignments.rows), 768, dtype=torch.bfloat16).to(CUDA)
        weight = random(self.EXPERTS, 512, 768, seed=1, dtype=torch.bfloat16).to(CUDA)
        of = make_operands(recipe, formats, values, weight.flatten(0, 1), values)
        layer = Fp8Grouped(of, choose_fp8_experts.load(), keep_weight=False)
        assert layer.output(Picked(values, None), weight, assignments).equal(
            layer.output(Picked(values, None), weight, assignments)
        )
