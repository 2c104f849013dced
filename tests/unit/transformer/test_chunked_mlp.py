"""An MLP of some tokens at a time: the bits of one chunk, and the tensors that exist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.recompute import RecomputeConfig
from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Positions
from tests import pool
from tests.unit.models.builds import GPT, LLAMA, make_build

S, B = 24, 2
MLP = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
NORM = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")}
NO_POSITIONS = {"position_embedding_type": "none"}
MODELS = {
    "gated": {**LLAMA, **NO_POSITIONS},
    "biases": {**GPT, **NO_POSITIONS},
    "adapters": {**LLAMA, **NO_POSITIONS, "lora_rank": 3, "lora_alpha": 5.0},
    "bf16": {**LLAMA, **NO_POSITIONS, "bf16": True, "fp32_residual_connection": True},
}


class WidestProduct(TorchDispatchMode):
    """Rows of the largest tensor with a column per inner channel of the MLP."""

    def __init__(self, widths):
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[-1] in self.widths:
                self.rows = max(self.rows, x.shape[0] * x.shape[1])
        return out


def step(fields, chunk, recompute):
    """Output, gradient of the input, gradients of all parameters."""
    build = make_build(fields, pool.groups(), recompute=RecomputeConfig(**recompute, mlp_chunk_size=chunk))
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 3)
    dtype = torch.float32 if build.config.fp32_residual_connection else build.dtype
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(S, B, build.config.hidden_size, generator=generator).to(dtype).requires_grad_()
    out = layer(x, Positions((), None))
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return out.detach(), x.grad, {name: p.grad for name, p in local_parameters(layer).items() if p.grad is not None}


@pytest.mark.parametrize("recompute", [MLP, NORM], ids=["mlp", "norm"])
@pytest.mark.parametrize("model", MODELS)
def test_one_chunk_gives_the_bits_of_the_whole(model, recompute):
    out, x_grad, gradients = step(MODELS[model], None, recompute)
    one_out, one_x_grad, one_gradients = step(MODELS[model], S * B, recompute)
    assert out.equal(one_out) and x_grad.equal(one_x_grad) and set(gradients) == set(one_gradients)
    assert all(gradients[name].equal(gradient) for name, gradient in one_gradients.items())


@pytest.mark.parametrize("recompute", [MLP, NORM], ids=["mlp", "norm"])
@pytest.mark.parametrize("model", ["gated", "biases", "adapters"])
def test_chunks_give_the_numbers_of_the_whole(model, recompute):
    out, x_grad, gradients = step(MODELS[model], None, recompute)
    some_out, some_x_grad, some_gradients = step(MODELS[model], 10, recompute)
    torch.testing.assert_close(some_out, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(some_x_grad, x_grad, rtol=1e-5, atol=1e-6)
    assert set(gradients) == set(some_gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(some_gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [MLP, NORM], ids=["mlp", "norm"])
def test_inner_tensors_have_the_size_of_a_chunk(recompute):
    width = MODELS["gated"]["ffn_hidden_size"]
    rows = []
    for chunk in (None, 10):
        with WidestProduct({width, 2 * width}) as widest:
            step(MODELS["gated"], chunk, recompute)
        rows.append(widest.rows)
    assert rows == [S * B, 10]
