"""Every way to recompute gives the bits of a forward that keeps everything: loss, gradients, random numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.recompute import RecomputeConfig
from megatron.core.parameter import local_parameters
from megatron.core.recompute.rerun import checkpoint
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.ops import gemm
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GEMMA2,
    GPT,
    LLAMA,
    differentiate,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
)


def selective(*modules):
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)


def full(method, number):
    return RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)


MODES = {
    "core_attn": RecomputeConfig(recompute_activations=True),
    "GEMM-last": RecomputeConfig(kaimm_recompute_norm=True, kaimm_recompute_mlp_activation_func=True),
    "mlp": selective("mlp"),
    "all parts": selective("core_attn", "norm", "mlp"),
    "full, uniform 1": full("uniform", 1),
    "full, uniform 2": full("uniform", 2),
    "full, block": full("block", 2),
}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
UNFUSED = {"attention_backend": "unfused"}
CLAMPED = {"softmax_type": "learnable", "activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0}
MODELS = {
    "llama": LLAMA,
    "llama, dropout": {**LLAMA, **DROPOUT},
    "gpt, dropout": {**GPT, **DROPOUT, **UNFUSED},
    "gpt, exact": {**GPT, "add_bias_linear": False, "apply_layernorm_1p": True},
    "gemma 2": {**GEMMA2, **DROPOUT},
    "capped scores": {**LLAMA, **DROPOUT, "attn_logit_softcapping": 0.5, "softmax_scale": 0.7},
    "sinks": {**LLAMA, **CLAMPED},
    "sinks, dropout, adapters": {**LLAMA, **CLAMPED, **DROPOUT, "lora_rank": 3},
    "squared relu": {**LLAMA, "swiglu": False, "squared_relu": True, "add_bias_linear": True, "qk_layernorm": True},
    "xielu": {**LLAMA, "swiglu": False, "xielu": True, "qk_layernorm": True, **DROPOUT},
    "xielu, adapters": {**LLAMA, "swiglu": False, "xielu": True, "bf16": True, "lora_rank": 3},
    "bf16": {**LLAMA, "bf16": True, "fp32_residual_connection": True, "apply_layernorm_1p": True},
    "bf16, layer norm": {**GPT, "bf16": True, "fp32_residual_connection": True},
    "parallel": {**GPT, **DROPOUT, "parallel_residual": True},
    "norms on both sides": {**GPT, **DROPOUT, "post_norm": True},
    "norms behind": {**LLAMA, "pre_norm": False, "post_norm": True, "bf16": True, "fp32_residual_connection": True},
    "adapters": {**LLAMA, **DROPOUT, "lora_rank": 3, "lora_dropout": 0.2},
    "gpt, separate gradients": {**GPT, "gradient_accumulation_fusion": False},
    "some adapters": {**GPT, "lora_rank": 3, "lora_target_modules": ("q_proj", "down_proj")},
}


def trained(fields, recompute, *, steps=2):
    """Losses and gradients of some microbatches, and where the random streams are afterwards."""
    model = make_model({**fields, "num_layers": 3}, pool.groups(), spread=0.3, recompute=recompute).train()
    if "lora_rank" in fields:
        freeze_all_but_adapters(local_parameters(model))
    data_parallel, found = make_data_parallel(model, pool.groups()), []
    data_parallel.begin_step(steps)
    for number in range(steps):
        loss = losses(model, make_ids(2, 8, seed=number))
        differentiate(data_parallel, loss.sum(), last=number == steps - 1)
        found.append(loss.detach())
    data_parallel.finish_reduction()
    return found, gradients(data_parallel), model._build.rng.state()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name):
    fields = MODELS[name]
    expected = trained(fields, RecomputeConfig())
    assert all(gradient.abs().max() > 0 for n, gradient in expected[1].items() if "k_layernorm" not in n)
    for mode, recompute in MODES.items():
        found = trained(fields, recompute)
        assert all(a.equal(b) for a, b in zip(found[0], expected[0], strict=True)), mode
        wrong = [n for n, gradient in expected[1].items() if not found[1][n].equal(gradient)]
        assert not wrong, f"{mode}: {wrong}"
        assert all(found[2][n].equal(state) for n, state in expected[2].items()), f"{mode}: random streams"


@pytest.mark.parametrize(
    ("mode", "products"),
    [
        ("GEMM-last", 0),
        ("core_attn", 0),
        ("mlp", 3),
        ("full, uniform 1", 9),
        ("full, uniform 2", 10),
        ("full, block", 6),
    ],
)
def test_products_that_run_twice(mode, products, monkeypatch):
    """Of three layers with four each. The last one of a region never does: only the result needs it."""
    counted, product = [], gemm.linear
    monkeypatch.setattr(gemm, "linear", lambda *args: counted.append(None) or product(*args))
    model = make_model({**LLAMA, **DROPOUT, "num_layers": 3}, pool.groups(), recompute=MODES[mode]).train()
    loss = losses(model, make_ids(2, 8)).sum()
    forward = len(counted)
    loss.backward()
    assert (forward, len(counted) - forward) == (13, products)  # with the head's


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_kept(mode):
    model = make_model({**LLAMA, **DROPOUT}, pool.groups(), recompute=MODES[mode]).eval()
    expected = make_model(LLAMA, pool.groups()).eval()
    with torch.no_grad():
        found = losses(model, make_ids(2, 8))
        assert found.equal(losses(expected, make_ids(2, 8))) and not found.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_evaluation_without_buckets(mode):
    """Dropout is off, and what is recomputed knows that. Upstream's linear layers needed a buffer for every
    gradient."""
    model = make_model({**LLAMA, **DROPOUT}, pool.groups(), recompute=MODES[mode]).eval()
    expected = make_model(LLAMA, pool.groups())
    for each in (model, expected):
        losses(each, make_ids(2, 8)).sum().backward()
    other = local_parameters(expected)
    assert all(p.grad.equal(other[n].grad) for n, p in local_parameters(model).items())


class TestCheckpoint:
    def rng(self):
        return RngTracker(5, pool.groups(), CPU)

    def test_weights_learn_though_no_input_needs_a_gradient(self):
        """The input of a first layer behind a frozen embedding: a checkpoint that is a node of its own would cut the
        graph there."""
        weight, x = torch.ones(3, requires_grad=True), torch.arange(3.0)
        checkpoint(lambda x: (x * weight).exp(), [x], self.rng()).sum().backward()
        torch.testing.assert_close(weight.grad, x * x.exp())

    def test_runs_again_once_and_not_past_the_last_saved_tensor(self):
        seen = []

        def function(x):
            seen.append("begins")
            y = x.exp().sin()
            seen.append("saved all")
            return y + 1

        x = torch.ones(2, requires_grad=True)
        out = checkpoint(function, [x], self.rng())
        assert seen == ["begins", "saved all"]
        out.sum().backward()
        assert seen == ["begins", "saved all", "begins"]

    def test_random_numbers_come_again_and_later_ones_are_not_disturbed(self):
        def run(again):
            rng, x = self.rng(), torch.ones(1000, requires_grad=True)

            def function(x):
                with rng.stream("sharded"):
                    return F.dropout(x * 2, 0.5).square()

            out = checkpoint(function, [x], rng) if again else function(x)
            with rng.stream("sharded"):
                before = torch.rand(3)
            out.sum().backward()
            with rng.stream("sharded"):
                return out.detach(), x.grad, before, torch.rand(3)

        assert all(a.equal(b) for a, b in zip(run(True), run(False), strict=True))

    def test_the_input_goes_through_hooks_of_saved_tensors(self):
        """So that activation offload can move it."""
        packed, x = [], torch.ones(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
            out = checkpoint(lambda x: x.exp().sin(), [x], self.rng())
        assert packed == [x.data_ptr()]
        out.sum().backward()
        torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())

    def test_memory_goes_as_backward_goes(self):
        """What the second run saved is let go by the node that used it."""
        storages, alive = [], []

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                kept = x * 2
                storages.append(StorageWeakRef(kept.untyped_storage()))
                ctx.save_for_backward(kept)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                assert len(ctx.saved_tensors) == 1  # and gone
                alive.append(sum(not storage.expired() for storage in storages))
                return grad

        out = checkpoint(
            lambda x: Watch.apply(Watch.apply(Watch.apply(x))), [torch.ones(2, requires_grad=True)], self.rng()
        )
        assert all(storage.expired() for storage in storages)
        out.sum().backward()
        assert alive == [2, 1, 0]

    def test_a_function_that_changes_its_mind_is_noticed(self):
        calls = []

        def function(x):
            calls.append(None)
            return x.exp() if len(calls) > 1 else x.exp().sin()

        out = checkpoint(function, [torch.ones(1, requires_grad=True)], self.rng())
        with pytest.raises(AssertionError, match="saved 2 tensors, and 1"):
            out.sum().backward()
