"""Products of experts: the loop and torch's grouped product, against each row's own product."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config.model import ModelConfig
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops import expert_weight_grad, gemm, grouped_gemm, weight_grad
from megatron.kernels.ops.assignments import SEPARATE, Picked, row_order
from megatron.kernels.ops.grouped_gemm import grouped, loop
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = {"loop": loop, "grouped": grouped}
CASES = ["uniform", "skew", "all", "ragged", "none"]
ROWS, E, IN, OUT = 13, 6, 16, 24


@pytest.fixture(params=[True, False], ids=["upcast", "native"])
def half_products(request, monkeypatch):
    """CPUs without and with instructions for bf16, whichever this one is."""
    monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16} if request.param else set())


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_a_cpu(case):
    """A CPU's grouped product is the loop, so that a run has the same bits with either."""
    assignments = assign(choices(case, ROWS, E), E)
    values, matrices = random(len(assignments.rows), IN, seed=1), random(E, OUT, IN).transpose(1, 2)
    assert torch.equal(grouped(values, matrices, assignments), loop(values, matrices, assignments))


def experts_of(assignments):
    return torch.repeat_interleave(torch.arange(E), torch.tensor(assignments.sizes))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.usefixtures("half_products")
class TestKernels:
    def matrices(self, dtype, transposed):
        return (
            random(E, OUT, IN, dtype=dtype, seed=3).transpose(1, 2) if transposed else random(E, IN, OUT, dtype=dtype)
        )

    def close(self, found, exact, dtype):
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bf16: the result and each product are rounded
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=10 * tolerance)

    def test_product(self, kernel, dtype, case, transposed):
        matrices, assignments = self.matrices(dtype, transposed), assign(choices(case, ROWS, E), E)
        values = random(len(assignments.rows), IN, dtype=dtype, seed=1)
        each = matrices.double()[experts_of(assignments)]
        found = kernel(values, matrices, assignments)
        self.close(found, torch.einsum("ai,aio->ao", values.double(), each), dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_their_sums(case, dtype):
    assignments = assign(choices(case, ROWS, E), E)
    rows, values = (random(n, IN, dtype=dtype, seed=n) for n in (ROWS, len(assignments.rows)))
    assert torch.equal(SEPARATE.gather(rows, assignments.rows), rows[assignments.rows])
    found = SEPARATE.add_up(values, row_order(assignments, ROWS))
    exact = torch.zeros(ROWS, IN).double().index_add_(0, assignments.rows, values.double())
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_sums_are_rounded_once():
    """The sum of many bf16 numbers is that of fp32: 1 + 64 / 256 and not 1, to which each 1/256 would be rounded
    away."""
    experts = 65
    values = torch.full((experts, 8), 1 / 256).bfloat16()
    values[0] = 1.0
    found = SEPARATE.add_up(values, row_order(assign([list(range(experts))], experts), 1))
    assert found.float().eq(1.25).all()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_no_rows(kernel):
    assignments = assign([], E)
    rows, matrices = torch.empty(0, IN), random(E, IN, OUT)
    gathered = SEPARATE.gather(rows, assignments.rows)
    assert kernel(gathered, matrices, assignments).shape == (0, OUT)
    assert SEPARATE.add_up(gathered, row_order(assignments, 0)).shape == (0, IN)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_write_weight_grad(case, overwrite):
    """Every expert's gradient is written, also over whatever was there, and added to."""
    assignments = assign(choices(case, ROWS, E), E)
    rows, grads = random(ROWS, IN), random(len(assignments.rows), OUT, seed=1)
    before = torch.full((E, OUT, IN), float("nan")) if overwrite else random(E, OUT, IN, seed=2)
    main_grad = before.clone()
    write = expert_weight_grad.one_by_one(weight_grad.fused)
    write(main_grad, Picked(grads, None), Picked(rows, assignments.rows), assignments, overwrite)
    expected = torch.zeros(E, OUT, IN) if overwrite else before
    of_each = torch.einsum("ao,ai->aoi", grads, rows[assignments.rows])
    torch.testing.assert_close(main_grad, expected.index_add(0, experts_of(assignments), of_each))


class TestChoose:
    """On a machine with CUDA, whose part torch's CPU kernels play."""

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        ones, tensor = torch.ones, torch.tensor
        monkeypatch.setattr(torch, "ones", lambda *shape, device, **options: ones(*shape, **options))
        monkeypatch.setattr(torch, "tensor", lambda data, device=None, **options: tensor(data, **options))

    @pytest.mark.parametrize(("device", "dtype"), [(CUDA, torch.bfloat16), (CPU, torch.float32)])
    def test_where_it_runs(self, device, dtype):
        kernel, why = grouped_gemm.choose(device, dtype, (64, 24))
        assert kernel is grouped and why is None

    @pytest.mark.parametrize(
        ("device", "dtype", "widths", "reason"),
        [
            (CPU, torch.bfloat16, (64, 24), "this CPU multiplies bfloat16 in fp32"),
            (CPU, torch.float32, (64, 22), "torch's grouped product needs widths that are multiples of 4, not 22"),
            (CUDA, torch.float16, (64, 24), "torch's grouped product is for bfloat16, not float16"),
            (CUDA, torch.float32, (64, 24), "torch's grouped product is for bfloat16, not float32"),
            (CUDA, torch.bfloat16, (64, 20), "torch's grouped product needs widths that are multiples of 8, not 20"),
        ],
    )
    def test_where_it_does_not_run(self, device, dtype, widths, reason, monkeypatch):
        monkeypatch.setattr(gemm, "_SLOW_ON_CPU", {torch.bfloat16})
        kernel, why = grouped_gemm.choose(device, dtype, widths)
        assert kernel is loop and why == reason

    def test_a_device_that_cannot(self, monkeypatch):
        def fail(*args, **options):
            raise RuntimeError("grouped_mm needs compute capability 8.0\n(at Blas.cpp)")

        monkeypatch.setattr(F, "grouped_mm", fail)
        kernel, why = grouped_gemm.choose(CUDA, torch.bfloat16, (64,))
        assert kernel is loop and why is not None and why.endswith("here: grouped_mm needs compute capability 8.0")

    def test_wrong_results(self, monkeypatch):
        right = F.grouped_mm
        monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: right(*args, **options) * 2)
        kernel, why = grouped_gemm.choose(CUDA, torch.bfloat16, (64,))
        assert kernel is loop and "wrongly" in str(why)


def test_choose_kernels_of_a_run():
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    assert choose_kernels(ModelConfig(**sizes), CPU).grouped_missing == "the model has no experts"
    experts = choose_kernels(ModelConfig(**sizes, num_experts=4, ffn_hidden_size=96), CPU)
    assert experts.grouped is grouped and experts.grouped_missing is None
