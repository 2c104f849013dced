"""Runs with all Triton kernels under layouts, in Triton's interpreter, against one process without them; run by
tests/unit/kernels/test_triton.py.
"""

import functools

import pytest
import torch

from megatron.kernels import fused
from megatron.kernels.backends.triton.adam import OnePassAdamW
from tests import pool
from tests.parallel import strategies
from tests.parallel.strategies import STRATEGIES, make_run, whole

LAYOUTS = {
    "one process": (1, {}),
    "tensor and sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "ZeRO-1": (2, {"settings": STRATEGIES["optim, overlapped"]}),
    "ZeRO-3": (2, {"settings": STRATEGIES["params"]}),
}


def trained(rank, size, options, kernels):
    """Losses and weights after two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "SAMPLES", 4)
        if kernels:
            patch.setattr(fused, "missing", lambda device: None)
        run = make_run(**{"settings": {}, **options, "make_adamw": OnePassAdamW if kernels else None})
        losses, _ = run.steps(2)
        return losses, run.weights()


@functools.cache
def reference():
    ((losses, weights),) = pool.run(1, trained, {}, False)
    return losses, whole([weights])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_the_same(name):
    (losses, expected), (size, options) = reference(), LAYOUTS[name]
    ranks = pool.run(size, trained, options, True, timeout=600.0)
    found = whole([weights for _, weights in ranks])
    for of_rank, _ in ranks:
        torch.testing.assert_close(of_rank, losses, rtol=1e-5, atol=0.0)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-4 * float(tensor.abs().max()))
