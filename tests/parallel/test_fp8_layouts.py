"""FP8 products are the same under every layout: scales, quantized weights, losses and gradients.

Layouts add in another order, so activations differ in their last bits. Some of them then round to the neighbouring FP8
number, 6 % away, which is why losses differ by more than those of other parity tests.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare, measure, reduced
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.setup import build
from tests import pool
from tests.unit.config.runs import make_run

STEPS, LOSS, GRADIENT = 6, 1e-4, 0.05
CPU = torch.device("cpu")
# A quarter of the MLP's width is a block of weights.
LLAMA = {
    "num_attention_heads": 8,
    "ffn_hidden_size": 512,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
RECIPES = {
    "blockwise": Fp8Config(fp8_format="hybrid", fp8_recipe="blockwise"),
    "delayed": Fp8Config(fp8_format="hybrid", fp8_amax_history_len=3, fp8_amax_compute_algo="max"),
    "tensorwise": Fp8Config(fp8_format="e4m3", fp8_recipe="tensorwise"),
}
LAYOUTS = [
    ParityLayout(2, 1),
    ParityLayout(2, 1, True),
    ParityLayout(4, 1, True),
    ParityLayout(1, 2),
    ParityLayout(1, 1, pp=2, schedule="zb-h1"),
    ParityLayout(1, 1, cp=2),
    ParityLayout(2, 1, True, pp=2),
]
SHARDED = ["optim", "optim_grads", "optim_grads_params"]
QUICK = {("blockwise", LAYOUTS[1]), ("delayed", LAYOUTS[4])}


# Experts of a width of which a half is a block of weights.
EXPERTS = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": (0.01,)}


def groups_of(layout):
    return pool.groups(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=layout.etp)


def run_of(recipe, model=LLAMA, recomputed=(), **parallel):
    run = reduced(make_run(**model), STEPS)
    train = dataclasses.replace(run.train, global_batch_size=4)
    parallel = dataclasses.replace(run.parallel, **parallel)
    if recomputed:
        again = {"recompute_granularity": "selective", "recompute_modules": recomputed}
        run = dataclasses.replace(run, recompute=dataclasses.replace(run.recompute, **again))
    return dataclasses.replace(run, train=train, parallel=parallel, fp8=RECIPES[recipe])


def measured(rank, size, run, layout):
    return measure(under(run, layout), groups_of(layout), CPU).as_arrays()


@functools.cache
def reference(recipe, experts=False, latents=False):
    run = latent_run(recipe) if latents else run_of(recipe, EXPERTS if experts else LLAMA)
    return assemble(pool.run(1, measured, run, ParityLayout(1, 1)))


def assert_same(recipe, run, layout):
    check(under(run, layout), layout.world_size)
    expected = reference(recipe, run.model.num_experts is not None, run.model.multi_latent_attention)
    difference = compare(expected, assemble(pool.run(layout.world_size, measured, run, layout)))
    assert difference.loss <= LOSS, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= GRADIENT, f"{difference.parameter} differs by {difference.gradient:.1e}"


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=[] if (recipe, layout) in QUICK else [pytest.mark.slow])
        for recipe in RECIPES
        for layout in LAYOUTS
    ],
    ids=str,
)
def test_losses_and_gradients(recipe, layout):
    assert_same(recipe, run_of(recipe), layout)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_sharded_parameters(recipe, strategy):
    assert_same(recipe, run_of(recipe, data_parallel_sharding_strategy=strategy), ParityLayout(1, 2))


def latent_run(recipe):
    """Latent attention, whose latents and heads are multiples of 16."""
    latents = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_layernorm": True}
    run = run_of(recipe, LLAMA | latents)
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **sizes))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("delayed", LAYOUTS[1]),
        pytest.param("blockwise", LAYOUTS[1], marks=pytest.mark.slow),
        pytest.param("tensorwise", LAYOUTS[1], marks=pytest.mark.slow),
        pytest.param("tensorwise", LAYOUTS[0], marks=pytest.mark.slow),
        pytest.param("blockwise", LAYOUTS[4], marks=pytest.mark.slow),
        pytest.param("delayed", LAYOUTS[5], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_latents(recipe, layout):
    assert_same(recipe, latent_run(recipe), layout)


OVER_TP = ParityLayout(2, 1, True, ep=2, etp=1)
OF_EXPERTS = {
    "ep": (ParityLayout(1, 2, ep=2), {}),
    "ep over tp": (OVER_TP, {}),
    "ep over cp": (ParityLayout(1, 1, cp=2, ep=2), {}),
    "etp": (ParityLayout(2, 1, True), {}),
    "all again": (OVER_TP, {"recomputed": ("moe",)}),
    "ZeRO-3": (ParityLayout(1, 2, ep=2), {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "ep and edp, ZeRO-3": (ParityLayout(1, 4, ep=2), {"data_parallel_sharding_strategy": "optim_grads_params"}),
}
QUICK_EXPERTS = {("blockwise", "ZeRO-3"), ("delayed", "ep"), ("tensorwise", "etp")}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=[] if (recipe, name) in QUICK_EXPERTS else [pytest.mark.slow])
        for recipe in RECIPES
        for name, (layout, _) in OF_EXPERTS.items()
        # Rows of several microbatches share a tensorwise scale where ep is larger than tp x cp.
        if recipe != "tensorwise" or layout.ep <= layout.tp * layout.cp
    ],
)
def test_experts(recipe, name):
    layout, flags = OF_EXPERTS[name]
    assert_same(recipe, run_of(recipe, EXPERTS, **flags), layout)


def test_histories_of_experts():
    """Every rank has those of all experts."""
    run = run_of("delayed", EXPERTS)
    ((expected, _),) = pool.run(1, state, run, ParityLayout(1, 1), 2)
    (found, _), (other, _) = pool.run(2, state, run, OVER_TP, 2)
    assert found[0].shape[0] == 3 * 8, "of two layers, each with two products of attention and two of experts"
    assert all(np.array_equal(here, there) for here, there in zip(found, other, strict=True))
    assert (found[1][:, :2] > 0).all()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def state(rank, size, run, layout, steps):
    """(histories after each of some steps; name -> (place, FP8 numbers as bytes) of this rank's weights after them)"""
    trainer = build(under(run, layout), groups_of(layout), CPU)
    histories = []
    for _ in range(steps):
        trainer.train_step()
        if trainer.step.features.fp8.scales is not None:
            histories.append(trainer.step.features.fp8.scales.history.numpy().copy())
    weights = {}
    for name, (module, kernel) in trainer.step.features.fp8._layers.items():
        quantized = kernel.weight(module.weight.detach().flatten(0, -2), transposed=False)
        data = quantized.data.view(torch.uint8).view(module.weight.shape)
        (section,) = module.weight.info.sections
        weights[name] = section.offset, data.numpy()
    return histories, weights


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout is LAYOUTS[6] else [pytest.mark.slow]) for layout in LAYOUTS],
    ids=str,
)
def test_histories(layout):
    """Every rank has those of the whole model."""
    run = run_of("delayed")
    ((expected, _),) = pool.run(1, state, run, ParityLayout(1, 1), 3)
    (found, _), *others = pool.run(layout.world_size, state, run, layout, 3)
    for other, _ in others:
        assert all(np.array_equal(here, there) for here, there in zip(found, other, strict=True))
    assert (found[2] > 0).all(), "three steps of three"
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)  # before any FP8 product
    # Another order of sums flips roundings to FP8, whose steps are an eighth; a largest value moves by a part of one.
    np.testing.assert_allclose(found[2], expected[2], rtol=0.05)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=[] if layout is LAYOUTS[1] else [pytest.mark.slow])
        for recipe in ("blockwise", "tensorwise")
        for layout in (LAYOUTS[1], LAYOUTS[2])
    ],
    ids=str,
)
def test_the_weights_of_a_shard_are_quantized_as_in_the_whole(recipe, layout):
    run = run_of(recipe)
    ((_, whole),) = pool.run(1, state, run, ParityLayout(1, 1), 0)
    compared = 0
    for _, weights in pool.run(layout.world_size, state, run, layout, 0):
        for name, (offset, data) in weights.items():
            if recipe == "blockwise" and "self_attention" in name:
                continue  # a rank's heads are narrower than a block
            place = tuple(slice(start, start + n) for start, n in zip(offset, data.shape, strict=True))
            assert np.array_equal(whole[name][1][place], data), name
            compared += data.size
    assert compared >= sum(data.size for name, (_, data) in whole.items() if "mlp" in name)
