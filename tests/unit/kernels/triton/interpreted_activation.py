"""Gated activations in Triton's interpreter against their references; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.kernels.backends.triton import activation
from megatron.kernels.ops import activation as reference
from tests.unit.kernels.close import random
from tests.unit.kernels.triton.near import assert_near

PAIRS = [(getattr(activation, name), getattr(reference, name)) for name in ("swiglu", "geglu", "geglu_tanh")]


@pytest.mark.parametrize(("found", "expected"), PAIRS)
@pytest.mark.parametrize("shape", [(5, 3, 66), (7, 2), (0, 8), (2, 2 * 1500)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_parity(found, expected, shape, scale):
    x, grad = random(*shape, scale=scale), random(*shape[:-1], shape[-1] // 2, seed=1)
    assert_near((found.product(x),), (expected.product(x),))
    assert_near((found.gradient_of_input(grad, x),), (expected.gradient_of_input(grad, x),))


def test_any_strides():
    x, grad = random(6, 5, 2, 8)[:, :, 1], random(4, 5, 6, seed=1).permute(2, 1, 0)
    for found, expected in PAIRS:
        assert_near((found.product(x),), (expected.product(x),))
        assert_near((found.gradient_of_input(grad, x),), (expected.gradient_of_input(grad, x),))


def test_under_autograd():
    x, grad = random(5, 12), random(5, 6, seed=1)
    for found, expected in PAIRS:
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        results = [each(leaf) for each, leaf in zip((found, expected), leaves, strict=True)]
        assert_near(results[:1], results[1:])
        gradients = [torch.autograd.grad(out, leaf, grad)[0] for out, leaf in zip(results, leaves, strict=True)]
        assert_near(gradients[:1], gradients[1:])
