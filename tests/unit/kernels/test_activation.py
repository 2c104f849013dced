"""Activations against their formulas, and the gated one's rounding against transformers' MLP."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from megatron.core.transformer.xielu import XieluPrologue
from megatron.kernels.ops.activation import (
    Gated,
    QuickGELU,
    geglu,
    geglu_tanh,
    gelu,
    gelu_tanh,
    quick_geglu,
    squared_relu,
    swiglu,
)
from megatron.spec.mlp import GateForm
from tests.unit.kernels.close import assert_same, outputs_and_gradients, random


def plain_swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def plain_gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def plain_gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_squared_relu(x):
    return torch.where(x > 0, x * x, 0 * x)


def plain_gate(x, limit, offset):
    gate, up = x.chunk(2, -1)
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    return gate / (1 + (-1.702 * gate).exp()) * (up + offset)


def plain_xielu(x, alpha_p, alpha_n):
    positive, negative = (1 + alpha_p.exp()).log(), 0.5 + (1 + alpha_n.exp()).log()
    return torch.where(x > 0, positive * x * x + x / 2, negative * (x.exp() - 1 - x) + x / 2)


def kernel_xielu(x, alpha_p, alpha_n):
    return XieluPrologue(SimpleNamespace(alpha_p=alpha_p, alpha_n=alpha_n))(x)


@pytest.mark.parametrize("shape", [(3, 2, 16), (7, 5)])
def test_xielu(shape):
    assert_same(kernel_xielu, plain_xielu, [random(*shape, scale=2.0), torch.tensor([0.7]), torch.tensor([-1.3])])


@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (quick_geglu, lambda x: plain_gate(x, math.inf, 0.0)),
        (Gated(QuickGELU(), GateForm(offset=-0.5)), lambda x: plain_gate(x, math.inf, -0.5)),
        (Gated(QuickGELU(), GateForm(1.5, 1.0)), lambda x: plain_gate(x, 1.5, 1.0)),
        (swiglu, plain_swiglu),
        (geglu, lambda x: plain_gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        (geglu_tanh, lambda x: plain_gelu_tanh(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        (gelu, plain_gelu),
        (gelu_tanh, plain_gelu_tanh),
        (squared_relu, plain_squared_relu),
    ],
)
@pytest.mark.parametrize("shape", [(3, 2, 16), (7, 6)])
def test_formula(kernel, reference, shape):
    assert_same(kernel, reference, [random(*shape, scale=2.0)])


def test_swiglu_does_not_change_its_input():
    x = random(4, 8)
    before = x.clone()
    outputs_and_gradients(swiglu, [x], torch.ones(4, 4))
    assert x.equal(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_swiglu_rounds_as_transformers_does(dtype):
    """Bit for bit, with gate and up as one weight."""
    hidden, inner = 48, 96
    theirs = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_attention_heads=4)).to(dtype)
    x = random(32, hidden, dtype=dtype)
    gate_up = torch.cat([theirs.gate_proj(x), theirs.up_proj(x)], dim=-1)
    assert theirs.down_proj(swiglu(gate_up)).equal(theirs(x))
    once = plain_swiglu(gate_up.float()).to(dtype)
    assert not swiglu(gate_up).equal(once), "rounding once would give other bits"
