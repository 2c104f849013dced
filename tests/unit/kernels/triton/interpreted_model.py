"""Whole models with the Triton kernels, in Triton's interpreter, against the same models without them; run by
tests/unit/kernels/test_triton.py.
"""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.recompute import KEEP_ALL, RecomputeConfig
from megatron.kernels import fused
from megatron.kernels.backends.triton.adam import OnePassAdamW
from megatron.kernels.ops import rope
from tests import pool
from tests.unit.kernels.close import random
from tests.unit.models.builds import (
    CPU,
    FACTORS,
    GEMMA2,
    GPT,
    LLAMA,
    accumulate,
    assert_gradients,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
)


@pytest.fixture
def interpreted(monkeypatch):
    """Models get the Triton kernels, as on CUDA."""
    monkeypatch.setattr(fused, "missing", lambda device: None)


def test_the_kernels_are_tried_and_taken(interpreted):
    chosen, choice = fused.choose_fused(ModelConfig(**LLAMA), CPU, torch.float32, OptimizerConfig(), blocks=True)
    assert choice == (
        "norms, gated activation, rotation, QKV split, cross entropy, merge of blocks, AdamW, gradient norm, "
        "embedding gradient ()"
    )
    changed = {name for name in chosen._fields if getattr(chosen, name) is not getattr(fused.SEPARATE, name)}
    assert changed == {*chosen._fields} - {"state_pass"}  # the model has no delta net


def test_a_model_names_what_it_lacks(interpreted):
    _, choice = fused.choose_fused(ModelConfig(**GPT), CPU, torch.float32)
    assert choice == (
        "norms, cross entropy (gated activation not: the model has none; rotation not: the model has none; "
        "QKV split not: the model has none; merge of blocks not: there is one; AdamW not: nothing is trained; "
        "gradient norm not: nothing is trained; embedding gradient not: nothing is trained)"
    )


def test_flags_leave_kernels_out(interpreted):
    sgd = OptimizerConfig(optimizer="sgd")
    config = ModelConfig(**LLAMA, persist_layer_norm=False, bias_swiglu_fusion=False, apply_rope_fusion=False)
    chosen, choice = fused.choose_fused(config, CPU, torch.float32, sgd)
    flags = (
        ("norms", "persist-layer-norm"),
        ("gated activation", "bias-swiglu-fusion"),
        ("rotation", "rope-fusion"),
        ("QKV split", "rope-fusion"),
    )
    reasons = "; ".join(f"{name} not: --no-{flag}" for name, flag in flags)
    reasons += "; merge of blocks not: there is one; AdamW not: --optimizer is sgd"
    assert choice == f"cross entropy, gradient norm, embedding gradient ({reasons})"
    taken = {name: getattr(chosen, name) for name in ("cross_entropy", "square_sum", "add_rows")}
    assert chosen == fused.SEPARATE._replace(**taken)


class Swapped(OnePassAdamW):
    """Updates the second of two runs with the numbers of the first."""

    def __init__(self, runs, device):
        first, second = runs
        super().__init__([first, second._replace(decay=first.decay, decoupled=first.decoupled)], device)


def test_a_kernel_that_fails_or_is_wrong_is_left_out(interpreted, monkeypatch):
    def broken(x, cos, sin, interleaved):
        raise ValueError("no such instruction\non this GPU")

    wrong = fused.load().cross_entropy._replace(local_statistics=lambda logits, targets, first: random(3, len(logits)))
    of_rope = rope.SplitRotation(rope.split, rope.join)
    found = fused.SEPARATE._replace(rotate_once=broken, split=of_rope, cross_entropy=wrong, make_adamw=Swapped)
    monkeypatch.setattr(fused, "load", lambda: found)
    chosen, choice = fused.choose_fused(ModelConfig(**LLAMA), CPU, torch.float32, OptimizerConfig())
    wrong_results = "not: its results are wrong"
    reasons = (
        f"rotation not: no such instruction; cross entropy {wrong_results}; merge of blocks not: there is one; "
        f"AdamW {wrong_results}"
    )
    assert choice == f"norms, gated activation, QKV split, gradient norm, embedding gradient ({reasons})"
    assert chosen.rotate_once is fused.SEPARATE.rotate_once and chosen.cross_entropy == fused.SEPARATE.cross_entropy
    assert chosen.make_adamw is None


MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "gemma2": GEMMA2,
    "scaled branches": {**LLAMA, **FACTORS},
    "fp32 stream": {**LLAMA, "fp32_residual_connection": True},
    "dropout": {**LLAMA, "hidden_dropout": 0.2},
    "experts": {**LLAMA, "num_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 24},
    "qk norm": {**LLAMA, "qk_layernorm": True},
    "qk norm behind the rotation": {**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rope": True},
    "part of a head": {**LLAMA, "rotary_percent": 0.5, "rotary_interleaved": True},
}
KEPT = {
    "all": KEEP_ALL,
    "whole layers": RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "first layer": RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "norms again": RecomputeConfig(recompute_granularity="selective", recompute_modules=["layernorm"]),
}
CASES = [(name, "all") for name in MODELS] + [("llama", again) for again in KEPT if again != "all"]


@pytest.mark.parametrize(("name", "again"), CASES)
def test_a_model_computes_the_same(monkeypatch, name, again):
    """Its layers leave additions to the norms behind them, where recompute and GEMM-last let them."""
    groups, ids = pool.groups(), make_ids(1, 7)
    found = []
    for why in ("not asked for", None):
        monkeypatch.setattr(fused, "missing", lambda device, why=why: why)
        model = make_model(
            {**MODELS[name], "num_layers": 2 if again == "all" else 3}, groups, spread=0.1, recompute=KEPT[again]
        )
        data_parallel = make_data_parallel(model, groups)
        accumulate(model, data_parallel, [ids])
        found.append((losses(model, ids).detach(), gradients(data_parallel)))
    (expected, expected_gradients), (loss, found_gradients) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert_gradients(found_gradients, expected_gradients)
