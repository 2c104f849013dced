"""An MLP or experts of some tokens at a time: the bits of one chunk, and the tensors that exist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.recompute import RecomputeConfig
from megatron.core.distributed.read_hooks import register_read_hook
from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Positions
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from tests import pool
from tests.unit.models.builds import GPT, LLAMA, make_build

S, B = 24, 2
MLP = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
NORM = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")}
NO_POSITIONS = {"position_embedding_type": "none"}
MODELS = {
    "gated": {**LLAMA, **NO_POSITIONS},
    "biases": {**GPT, **NO_POSITIONS},
    "trained activation": {**GPT, **NO_POSITIONS, "xielu": True},
    "adapters": {**LLAMA, **NO_POSITIONS, "lora_rank": 3, "lora_alpha": 5.0},
    "bf16": {**LLAMA, **NO_POSITIONS, "bf16": True, "fp32_residual_connection": True},
}
MOE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
ROUTED = {**LLAMA, **NO_POSITIONS, "num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
SHARED = {"moe_shared_expert_intermediate_size": 20}
EXPERTS = {
    "routed": ROUTED,
    "shared": {**ROUTED, **SHARED},
    "gate, bf16": {**ROUTED, **SHARED, "moe_shared_expert_gate": True, "bf16": True},
    "biases of experts": {**ROUTED, **SHARED, "add_bias_linear": True},
}
CASES = {
    **{
        f"{model}, again {' '.join(again['recompute_modules'])}": (MODELS[model], again)
        for model in MODELS
        for again in (MLP, NORM)
    },
    **{model: (fields, MOE) for model, fields in EXPERTS.items()},
}


class WidestProduct(TorchDispatchMode):
    """Rows of the largest tensor of so many dimensions with a column per inner channel of the MLP."""

    def __init__(self, widths, dimensions):
        super().__init__()
        self.widths, self.dimensions, self.rows = widths, dimensions, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim == self.dimensions and x.shape[-1] in self.widths:
                self.rows = max(self.rows, x.numel() // x.shape[-1])
        return out


def make_layer(fields, chunk, recompute):
    """A layer, and the constructor arguments that it shares with others."""
    build = make_build(fields, pool.groups(), recompute=RecomputeConfig(**recompute, mlp_chunk_size=chunk))
    layer = TransformerLayer(build, 0)
    initialize(local_parameters(layer), 3)
    return layer, build


def step(fields, chunk, recompute):
    """Output, gradient of the input, gradients of all parameters."""
    return run(*make_layer(fields, chunk, recompute))


def run(layer, build):
    """See `step`."""
    dtype = torch.float32 if build.config.fp32_residual_connection else build.dtype
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(S, B, build.config.hidden_size, generator=generator).to(dtype).requires_grad_()
    out = layer(x, Positions((), None), None, MicrobatchRouting(torch.arange(S), S, None))
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return out.detach(), x.grad, {name: p.grad for name, p in local_parameters(layer).items() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_one_chunk_gives_the_bits_of_the_whole(case):
    fields, recompute = CASES[case]
    out, x_grad, gradients = step(fields, None, recompute)
    one_out, one_x_grad, one_gradients = step(fields, S * B, recompute)
    assert out.equal(one_out) and x_grad.equal(one_x_grad) and set(gradients) == set(one_gradients)
    assert all(gradients[name].equal(gradient) for name, gradient in one_gradients.items())


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_chunks_give_the_numbers_of_the_whole(case):
    fields, recompute = CASES[case]
    out, x_grad, gradients = step(fields, None, recompute)
    some_out, some_x_grad, some_gradients = step(fields, 10, recompute)
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
        with WidestProduct({width, 2 * width}, 3) as widest:
            step(MODELS["gated"], chunk, recompute)
        rows.append(widest.rows)
    assert rows == [S * B, 10]


def test_rows_of_experts_have_the_size_of_a_chunk():
    """Two for each token: more than the rows of the gradients of an expert's matrices."""
    width, hidden, rows = ROUTED["moe_ffn_hidden_size"], ROUTED["hidden_size"], []
    for chunk in (None, 24):
        layer, build = make_layer(ROUTED, chunk, MOE)
        with WidestProduct({width, 2 * width}, 2) as widest:
            run(layer, build)
        rows.append(widest.rows)
    assert rows == [2 * S * B, 2 * 24] and hidden < 2 * 24


def test_generation_computes_all_tokens_at_once():
    """Ranks that share experts may generate different numbers of tokens."""
    layer, build = make_layer(ROUTED, 24, MOE)
    width = ROUTED["moe_ffn_hidden_size"]
    with torch.no_grad(), WidestProduct({width, 2 * width}, 2) as widest:
        layer(torch.randn(S, B, build.config.hidden_size), Positions((), None))
    assert widest.rows == 2 * S * B


@pytest.mark.parametrize("again", [MLP, NORM])
def test_weights_that_are_freed_between_uses(again):
    """Each gets its memory when a module's attribute is read, as under ZeRO-3: autograd must not note that it is
    empty."""
    fields = MODELS["trained activation"]
    expected = step(fields, 5, again)
    layer, build = make_layer(fields, 5, again)
    values = {id(parameter): parameter.detach().clone() for parameter in layer.parameters()}

    def provide(parameter):
        parameter.data = values[id(parameter)]

    register_read_hook(layer, provide)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0)
    for result, wanted in zip(tree_leaves(run(layer, build)), tree_leaves(expected), strict=True):
        assert torch.equal(result, wanted)
