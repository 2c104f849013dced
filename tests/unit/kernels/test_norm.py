"""RMSNorm and LayerNorm against their formulas, and RMSNorm's rounding against transformers' module."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron.kernels.ops.norm import layer_norm, rms_norm, separate
from tests.unit.kernels.close import assert_same, outputs_and_gradients, random

EPSILON = 1e-5


def plain_rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def plain_layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight + bias


@pytest.mark.parametrize("shape", [(5, 3, 32), (7, 33), (4, 2, 3, 16), (1, 1, 4)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
class TestFormula:
    def test_rms_norm(self, shape, scale):
        inputs = random(*shape, scale=scale), random(shape[-1], seed=1)
        assert_same(lambda x, w: rms_norm(x, w, EPSILON), plain_rms_norm, inputs)

    def test_layer_norm(self, shape, scale):
        inputs = random(*shape, scale=scale), random(shape[-1], seed=1), random(shape[-1], seed=2)
        assert_same(lambda x, w, b: layer_norm(x, w, b, EPSILON), plain_layer_norm, inputs)


def test_layer_norm_without_bias():
    x, weight = random(4, 8), random(8, seed=1)
    assert_same(lambda x, w: layer_norm(x, w, None, EPSILON), lambda x, w: plain_layer_norm(x, w, 0.0), (x, weight))


def test_layer_norm_by_another_kernel():
    """Its halves are called, and not torch's operator for both."""
    kernel = separate._replace(compute_layer_norm=lambda *inputs: separate.compute_layer_norm(*inputs))
    inputs = random(5, 3, 32), random(32, seed=1), random(32, seed=2)
    assert_same(lambda x, w, b: layer_norm(x, w, b, EPSILON, kernel), plain_layer_norm, inputs)
    assert_same(
        lambda x, w: layer_norm(x, w, None, EPSILON, kernel), lambda x, w: plain_layer_norm(x, w, 0.0), inputs[:2]
    )


def test_a_row_of_zeros_stays_finite():
    out, grad_x, grad_weight = outputs_and_gradients(
        lambda x, w: rms_norm(x, w, EPSILON), (torch.zeros(2, 8), torch.ones(8)), torch.ones(2, 8)
    )
    assert out.eq(0).all() and grad_weight.eq(0).all()
    torch.testing.assert_close(grad_x, torch.full((2, 8), EPSILON**-0.5))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_any_strides(order):
    """Queries, keys and their gradients come as views of other layouts."""
    x, upstream = random(6, 6, 6).permute(order), random(6, 6, 6, seed=3).permute(2, 0, 1)
    weight = random(6, seed=1)

    def kernel(x, w):
        return rms_norm(x, w, EPSILON)

    leaves = [x.detach().requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(kernel(*leaves), leaves, upstream)
    expected = outputs_and_gradients(kernel, [x.contiguous(), weight], upstream.contiguous())[1:]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


class TestRounding:
    """In half precision the output has transformers' bits, but where the last bit of the fp32 mean tips a rounding: in
    at most one element of eps(half) / eps(fp32)."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
    def test_rms_norm(self, dtype, scale):
        x, weight = random(64, 4, 256, dtype=dtype, scale=scale), random(256, dtype=dtype, seed=1)
        theirs = LlamaRMSNorm(256, eps=EPSILON)
        theirs.weight.data = weight
        found, expected = rms_norm(x, weight, EPSILON), theirs(x)
        assert found.dtype == expected.dtype
        tipped = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        assert found.ne(expected).double().mean() <= tipped * 2
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)

    def test_the_order_of_rounding_can_be_seen(self):
        """A norm that rounds once, after the weight, differs in many elements: the test above can tell."""
        x, weight = random(64, 256, dtype=torch.bfloat16), random(256, dtype=torch.bfloat16, seed=1)
        once = plain_rms_norm(x.float(), weight.float()).bfloat16()
        assert rms_norm(x, weight, EPSILON).eq(once).float().mean() < 0.95

    def test_fp32_input_of_a_half_precision_layer(self):
        """The residual stream may be fp32 while weights are bf16: the output is bf16, the input's gradient fp32."""
        x, weight = random(8, 32), random(32, dtype=torch.bfloat16, seed=1)
        for norm in (rms_norm, lambda x, w, e: layer_norm(x, w, None, e)):
            out, grad_x, grad_weight = outputs_and_gradients(
                lambda x, w: norm(x, w, EPSILON),  # noqa: B023
                (x, weight),
                torch.ones(8, 32),
            )
            assert (out.dtype, grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)

    def test_bf16_gradients(self):
        """Within bf16's rounding of the true ones."""
        inputs = random(16, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16, seed=1)
        assert_same(lambda x, w: rms_norm(x, w, EPSILON), plain_rms_norm, inputs, rtol=1e-2, atol=2e-3)
