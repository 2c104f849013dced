"""Attention of blocks by CUDA's kernels against the reference in fp64: alone, and as the ranks of a ring."""

import pytest
import torch

from megatron.kernels.backends import flash
from megatron.kernels.choose_attention import Needs, block_candidates
from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.context_parallel import simulated
from tests.unit.kernels.close import random

pytestmark = NEEDS_CUDA
THIRD, FLASH, EFFICIENT = attention_lse.flash_attention_3, attention_lse.flash_attention, attention_lse.efficient
SCORES = Scores(0.1)
HALVES = [torch.bfloat16, torch.float16]
NAMES = {"flash 3": THIRD, "flash": FLASH, "efficient": EFFICIENT}
KERNELS = [(kernel, dtype) for kernel in (THIRD, FLASH) for dtype in HALVES]
KERNELS += [(EFFICIENT, dtype) for dtype in (*HALVES, torch.float32)]
IDS = [f"{next(name for name in NAMES if NAMES[name] is kernel)}-{str(dtype)[6:]}" for kernel, dtype in KERNELS]


@pytest.fixture(autouse=True)
def needs_ampere(request):
    reason, given = flash.missing(CUDA, torch.bfloat16), getattr(request.node, "callspec", None)
    if given is not None and given.params.get("kernel") is THIRD:
        third, *_ = block_candidates("flash")
        needs = Needs(
            CUDA, torch.bfloat16, given.params.get("d", 64), given.params.get("d", 64), 1, True, 0.0, None, False
        )
        reason = third.missing(needs) or third.load(needs)
    if reason:
        pytest.skip(f"no FlashAttention: {reason}")


def off_by(found, expected):
    """Largest difference, relative to the largest element; infinities have to be in the same places."""
    finite = expected.isfinite()
    assert found.isfinite().equal(finite)
    return float((found.double() - expected)[finite].abs().max() / expected[finite].abs().max().clamp(min=1e-30))


def tolerance(dtype):
    return max(1e-5, 4 * torch.finfo(dtype).eps)


def inputs(s, t, n, g, d, dtype):
    shapes = [(s, 2, n, d), (t, 2, g, d), (t, 2, g, d), (s, 2, n, d)]
    return [random(*shape, dtype=dtype, seed=seed).to(CUDA) for seed, shape in enumerate(shapes)]


RULES = {
    "all": ((100, 60), Rule(SCORES)),
    "causal": ((100, 100), Rule(SCORES, 0)),
    "later queries": ((40, 100), Rule(SCORES, 60)),
    "window": ((100, 100), Rule(SCORES, 0, 33)),
    "end of a window": ((31, 31), Rule(SCORES, 40, 41)),
    "segments": ((100, 60), Rule(SCORES, segments=(torch.arange(100) // 30, torch.arange(60) // 25 + 1))),
}


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=IDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("d", [64, 128, 20])
@pytest.mark.parametrize(("lengths", "rule"), RULES.values(), ids=RULES)
def test_a_block(kernel, dtype, heads, d, lengths, rule):
    """The gradient of a block among others: a third of the weight is elsewhere."""
    if rule.segments is not None:
        rule = rule._replace(segments=tuple(ids.expand(2, -1).to(CUDA) for ids in rule.segments))
    q, k, v, grad = inputs(*lengths, *heads, d, dtype)
    exact_out, exact_lse = attention_lse.reference.forward(q.double(), k.double(), v.double(), rule)
    out, lse = kernel.forward(q, k, v, rule)
    assert lse.dtype == torch.float32
    assert off_by(out, exact_out) < tolerance(dtype) and off_by(lse, exact_lse) < tolerance(dtype)
    merged_lse = exact_lse.masked_fill(exact_lse.isneginf(), 0.0) + 0.4
    merged_out = (exact_out / 1.5).to(dtype)
    found = kernel.backward(grad, q, k, v, merged_out, merged_lse.float(), rule)
    wide = [x.double() for x in (grad, q, k, v, merged_out)]
    for a, b in zip(found, attention_lse.reference.backward(*wide, merged_lse, rule), strict=True):
        assert off_by(a, b) < 2 * tolerance(dtype)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=IDS)
@pytest.mark.parametrize("run", [simulated.ring, simulated.gathered])
@pytest.mark.parametrize("segments", [None, torch.arange(480).expand(2, 480) // 70], ids=["", "segments"])
@pytest.mark.parametrize("window", [None, 50, 200])
def test_as_one_process(kernel, dtype, run, segments, window):
    segments = None if segments is None else segments.to(CUDA)
    data = inputs(480, 480, 8, 2, 64, dtype)
    found = run(kernel, *data, 3, segments, window)
    for a, b in zip(found, simulated.exact(*data, segments, window), strict=True):
        assert off_by(a, b) < 2 * tolerance(dtype)
