"""The gated delta rule with the states' kernels in Triton's interpreter; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.kernels import fused
from megatron.kernels.backends.triton import state_pass
from megatron.kernels.ops.delta_rule import SEPARATE_PASS, DeltaChunks, StatePass, delta_rule
from tests.unit.kernels.close import random
from tests.unit.kernels.test_delta_rule import arguments
from tests.unit.kernels.triton.near import assert_near
from tests.unit.models.builds import DELTA

TRITON = StatePass(state_pass.forward_, state_pass.backward_)


def results(passes, inputs, starts=None, upstream=(8, 9)):
    """Outputs, the last state, and all gradients. upstream: seeds of the gradients of outputs and of the last state."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out, last = delta_rule(*leaves[:5], state=leaves[5], starts=starts, state_pass=passes)
    pairs = [
        (x, random(*x.shape, seed=seed).to(x.dtype)) for x, seed in zip((out, last), upstream, strict=True) if seed
    ]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return out, last, *(None if x is None else x.grad for x in leaves)


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity(dtype, channels):
    """Two chunks and a part of one, with documents that begin within and at the edges of chunks, and a first state."""
    inputs = arguments(150, channels=channels)
    inputs[:3] = (x.to(dtype) for x in inputs[:3])
    starts = torch.zeros(inputs[2].shape[1], 150, dtype=torch.bool)
    starts[0, [5, 64, 127]] = True
    found, expected = (results(passes, inputs, starts) for passes in (TRITON, SEPARATE_PASS))
    # A sum whose order differs may round to the next bf16.
    assert_near(found, expected, 3e-6 if dtype == torch.float32 else 2.0**-7)


@pytest.mark.parametrize("upstream", [(8, None), (None, 9)], ids=["outputs", "state"])
def test_one_gradient_and_no_state(upstream):
    inputs = [*arguments(70)[:5], None]
    assert_near(*(results(passes, inputs, upstream=upstream) for passes in (TRITON, SEPARATE_PASS)), 3e-6)


@pytest.mark.parametrize(("tokens", "d_k", "d_v"), [(5, 8, 40), (64, 16, 8), (66, 100, 24), (65, 128, 17)])
def test_sizes(tokens, d_k, d_v):
    """Chunks and heads below the least tile, no power of two, and more value channels than a program has."""
    k = torch.nn.functional.normalize(random(tokens, 1, 1, d_k, seed=1), dim=-1)
    decay, beta = -random(tokens, 1, 2, seed=3).abs(), random(tokens, 1, 2, seed=4).sigmoid()
    v, state = random(tokens, 1, 2, d_v, seed=2), random(1, 2, d_k, d_v, seed=5)
    inputs = [random(tokens, 1, 1, d_k), k, v, decay, beta, state]
    assert_near(*(results(passes, inputs) for passes in (TRITON, SEPARATE_PASS)), 3e-6)


def test_state_gradient_of_parts():
    """Context parallelism calls the steps by themselves."""
    *inputs, state = arguments(100)
    grad = random(*inputs[2].shape, seed=8)
    found, expected = (
        (chunks.scan(state).last, chunks.state_gradient(grad))
        for chunks in (DeltaChunks(32, *inputs, None, passes) for passes in (TRITON, SEPARATE_PASS))
    )
    assert_near(found, expected, 3e-6)


def test_a_model_takes_them_where_they_are_right(monkeypatch):
    monkeypatch.setattr(fused, "missing", lambda device: None)
    cpu, name = torch.device("cpu"), "states of the delta rule"
    chosen, choice = fused.choose_fused(ModelConfig(**DELTA), cpu, torch.float32)
    assert chosen.state_pass == TRITON and f"{name} (" in choice
    chosen, choice = fused.choose_fused(ModelConfig(**DELTA | {"linear_key_head_dim": 256}), cpu, torch.float32)
    assert chosen.state_pass == SEPARATE_PASS and f"{name} not: a key has more than 128 channels" in choice
    wrong = fused.load()._replace(state_pass=StatePass(state_pass.forward_, lambda *inputs: inputs[1][0]))
    monkeypatch.setattr(fused, "load", lambda: wrong)
    chosen, choice = fused.choose_fused(ModelConfig(**DELTA), cpu, torch.float32)
    assert chosen.state_pass == SEPARATE_PASS and f"{name} not: its results are wrong" in choice
