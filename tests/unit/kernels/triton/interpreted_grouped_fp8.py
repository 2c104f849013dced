"""The grouped FP8 product in Triton's interpreter against the emulation; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.kernels import choose_fp8_experts
from megatron.kernels.backends.triton.grouped_fp8 import multiply
from megatron.kernels.ops.assignments import Picked
from megatron.kernels.ops.fp8.grouped import Fp8Grouped, emulated
from tests.unit.kernels.close import random
from tests.unit.kernels.experts import assign, choices
from tests.unit.kernels.fp8.layer import make_operands
from tests.unit.kernels.triton.near import assert_near

E = 5
SIZES = {"blockwise": (128, 256), "delayed": (48, 208), "tensorwise": (144, 128)}


@pytest.mark.parametrize("formats", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", SIZES)
@pytest.mark.parametrize(
    ("case", "rows"), [("uniform", 70), ("skew", 300), ("all", 130), ("ragged", 70), ("none", 3)], ids=str
)
def test_equals_the_emulation(case, rows, recipe, formats):
    """Experts of no row, of one, and of several tiles. Results are fp32, so that only the order of sums differs. The
    second product picks its rows.
    """
    assignments = assign(choices(case, rows, E), E)
    count, (outputs, inputs) = len(assignments.rows), SIZES[recipe]
    values, grads = random(count, inputs), random(rows, outputs, seed=2, scale=1e-3)
    weight = random(E, outputs, inputs, seed=1) * torch.exp2(torch.arange(E))[:, None, None]
    given = (values, weight.flatten(0, 1), grads) if count else (torch.ones(1), weight, torch.ones(1))
    results = []
    for product in (multiply, emulated):
        layer = Fp8Grouped(make_operands(recipe, formats, *given), product, keep_weight=True)
        results.append(
            (
                layer.output(Picked(values, None), weight, assignments),
                layer.input_grad(Picked(grads, assignments.rows), weight, assignments),
            )
        )
    assert_near(*results, 1e-5)


@pytest.mark.parametrize("recipe", SIZES)
def test_the_trial_of_set_up(recipe):
    config = Fp8Config(fp8_format="hybrid", fp8_recipe=recipe)
    choose_fp8_experts._try(choose_fp8_experts.load(), config, torch.device("cpu"))
