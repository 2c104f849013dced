"""Training is the same under every layout: losses over some steps and every gradient of the first, within 1e-5."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.rules.check import check
from megatron.tooling.layout_parity import Measurement, RankMeasurement, assemble, compare, measure, reduced
from megatron.tooling.layouts import GRID, ParityLayout, under
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.models.builds import LONGROPE

STEPS, FEW_STEPS, LIMIT = 20, 6, 1e-5
LLAMA = {
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {
    "llama": LLAMA,
    "olmo2": {
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "pre_norm": False,
        "post_norm": True,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "untie_embeddings_and_output_weights": True,
        "embedding_multiplier_scale": 8.0,  # without it such a model, whose branches have unit size, learns too slowly
    },
    "one norm": {
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "parallel_residual": True,
        "shared_norm": True,
        "norm_parameters": "weight",
        "qk_layernorm": True,
        "qk_layernorm_weight_per_head": True,
        "clip_qkv": 0.2,
        "untie_embeddings_and_output_weights": True,
        "add_output_layer_bias": True,
    },
    "xielu": {
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "xielu": True,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "norms behind the rotation": {**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rope": True},
    "latents": {
        "num_attention_heads": 8,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "delta nets": {
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": "2",
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "rotary_percent": 0.25,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    },
    "alibi": {
        "num_attention_heads": 8,
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    },
    "decays of channels": {
        "num_attention_heads": 8,
        "experimental_attention_variant": "kda",
        "linear_attention_freq": "2",
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_layernorm": True,
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    },
    "gpt": {
        "qk_layernorm": True,
        "eod_mask_loss": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "calculate_per_token_loss": True,
        "mask_padded_vocabulary": False,
        "add_output_layer_bias": True,
    },
}
LAYOUTS = [
    ParityLayout(2, 1),
    ParityLayout(2, 1, True),
    ParityLayout(4, 1, True),
    ParityLayout(2, 2, True),
    ParityLayout(1, 4),
]


def measured(rank, size, run, layout):
    return measure(under(run, layout), pool.groups(tp=layout.tp), torch.device("cpu")).as_arrays()


@functools.cache
def reference(model):
    run = reduced(make_run(**MODELS[model]), STEPS)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=4))
    return run, assemble(pool.run(1, measured, run, ParityLayout(1, 1)))


def is_covered(model, layout):
    """By the others."""
    if model in ("olmo2", "one norm", "xielu", "norms behind the rotation"):
        return layout is not LAYOUTS[1]
    if model == "latents":  # the others with experts: moe_grid.py
        return layout is not LAYOUTS[0]
    if model == "alibi":
        return layout is not LAYOUTS[3]
    if model in ("delta nets", "decays of channels"):
        return layout not in LAYOUTS[1:3]
    return layout in (LAYOUTS[0], LAYOUTS[2]) or (model == "gpt" and layout == LAYOUTS[1])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[pytest.mark.slow] if is_covered(model, layout) else [])
        for model in MODELS
        for layout in LAYOUTS
    ],
    ids=str,
)
def test_layout(model, layout):
    run, expected = reference(model)
    if layout.world_size > 2:  # large worlds are slow on few cores
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, train_iters=FEW_STEPS))
        few = {name: getattr(expected, name)[:FEW_STEPS] for name in ("losses", "norms", "balance")}
        expected = dataclasses.replace(expected, **few)
    check(under(run, layout), layout.world_size)
    found = assemble(pool.run(layout.world_size, measured, run, layout))
    difference = compare(expected, found)
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_learns(model):
    """Losses that do not move would hide a wrong gradient."""
    _, expected = reference(model)
    assert len(expected.losses) == STEPS and expected.losses[-1] < 0.95 * expected.losses[0]
    assert all(not gradient.isnan().any() for gradient in expected.gradients.values())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"bf16": True, "fp32_residual_connection": True}, {}),
        ({"fp16": True, "loss_scale": 128.0}, {}),
        ({"attention_backend": "flash"}, {}),
        ({"attention_dropout": 0.3, "hidden_dropout": 0.3}, {}),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
        ({"swiglu": True, "qk_layernorm": True}, {"swiglu": True, "qk_layernorm": True}),
        (
            {"num_attention_heads": 16, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 4},
            {"num_attention_heads": 16, "num_query_groups": 2},
        ),
        (
            {**LONGROPE, "kv_channels": 12, "short_factor": "1,2,3,4,5,6", "long_factor": "2,3,4,5,6,7"},
            {"short_factor": "1.0,1.0,2.0,3.0,4.0,4.0,5.0,6.0", "rope_scaling_original_max_position_embeddings": 32},
        ),
        ({**LONGROPE, "rope_scaling_original_max_position_embeddings": 10**5, "kv_channels": 4}, {"window_size": None}),
    ],
)
def test_any_run_can_be_reduced(asked, expected):
    """To one that every layout of the grid can run on this machine."""
    small = reduced(make_run(given=tuple(asked), **asked), 3)
    for layout in GRID:
        check(under(small, layout), layout.world_size)
    for name, value in expected.items():
        assert small.value(name) == value
    found = pool.run(1, measured, small, ParityLayout(1, 1))[0]
    assert len(found.losses) == 3 and found.pieces


class TestCompare:
    def measurement(self, losses=(2.0, 1.0), a=1.0, b=1e-9):
        return Measurement(list(losses), {"a": torch.tensor([a, 0.5]), "b": torch.tensor([b])})

    def test_loss(self):
        found = compare(self.measurement(), self.measurement(losses=(2.0, 1.01)))
        assert found.loss == pytest.approx(0.01) and found.gradient == 0.0

    def test_gradient(self):
        found = compare(self.measurement(), self.measurement(a=1.1))
        assert found.gradient == pytest.approx(0.1) and found.parameter == "a"

    def test_a_gradient_that_is_truly_zero_holds_only_rounding(self):
        found = compare(self.measurement(), self.measurement(b=-1e-9))
        assert found.gradient < 1e-6

    def test_but_not_one_that_should_be(self):
        found = compare(self.measurement(b=0.0), self.measurement(b=1e-3))
        assert found.gradient > 1e-2 and found.parameter == "b"

    def test_a_token_that_an_expert_takes_in_one_run_only(self):
        """Of two experts in another order; the margin says whether rounding can have decided."""
        first = self.routed([[3, 1]], [[0.5, -1e-7]])
        assert compare(first, self.routed([[1, 3]], [[-1e-7, 0.5]])).choice is None
        assert compare(first, self.routed([[1, 3]], [[1e-7, 0.5]])).choice == (0, 2, 0, pytest.approx(1e-7))
        assert compare(first, self.routed([[1, 3]], [[-1e-7, -0.5]])).choice == (0, 2, 0, pytest.approx(0.5))

    def routed(self, experts, margins):
        key = 0, "sample", 2
        choice = {"choices": {key: torch.tensor(experts)}, "margins": {key: torch.tensor([1.0])}}
        return dataclasses.replace(self.measurement(), **choice, capacity_margins={key: torch.tensor(margins)})

    def test_nan_is_a_difference(self):
        found = compare(self.measurement(), self.measurement(b=float("nan")))
        assert not found.gradient <= LIMIT
        found = compare(self.measurement(), self.measurement(losses=(2.0, float("nan"))))
        assert not found.loss <= LIMIT


def test_replicas_that_disagree_are_found():
    whole = ((0,), (2,))
    ranks = [RankMeasurement([1.0], [("a", whole, torch.tensor([1.0, value]))]) for value in (2.0, 2.1)]
    with pytest.raises(AssertionError, match="replicas disagree on a"):
        assemble(ranks)
    with pytest.raises(AssertionError, match="ranks report different losses"):
        assemble([RankMeasurement([1.0], []), RankMeasurement([1.1], [])])
