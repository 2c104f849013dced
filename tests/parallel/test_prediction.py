"""Further tokens are predicted as on one process, under every layout; models with experts are in test_moe_layouts.py."""

import dataclasses
import functools

import pytest

from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.test_layout_parity import LIMIT
from tests.parallel.test_layout_parity_pp_cp import LAYERS, measured, small

SAMPLES, STEPS, DEPTHS = 4, 3, 2
ZERO_2, ZERO_3 = ({"data_parallel_sharding_strategy": name} for name in ("optim_grads", "optim_grads_params"))
OVERLAPPED = {"overlapped_distributed_optimizer": True}
UNTIED, TIED = {"untie_embeddings_and_output_weights": True}, {"untie_embeddings_and_output_weights": False}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Fields of the model, of the data, of the layout.
CASES = [
    (TIED, {}, ParityLayout(2, 1), {}),
    (UNTIED, DOCUMENTS, ParityLayout(1, 2), ZERO_3),
    (TIED, {}, ParityLayout(1, 2), ZERO_3),
    (TIED, {}, ParityLayout(2, 2, True), OVERLAPPED),
    (UNTIED, DOCUMENTS, ParityLayout(1, 1, cp=2, comm_type="p2p"), {}),
    (TIED, DOCUMENTS, ParityLayout(2, 1, True, cp=2, comm_type="a2a"), {}),
    (TIED, {}, ParityLayout(1, 2, False, 2, "interleaved", 2), ZERO_2),
    (UNTIED, {}, ParityLayout(1, 1, False, 2, "zb-h1"), {}),
    (TIED, DOCUMENTS, ParityLayout(2, 1, True, 2, "zb-v"), {}),
    (UNTIED, {}, ParityLayout(1, 2, False, 2, "gpipe"), OVERLAPPED),
]


def predicting(fields, data, layers, parallel, **recompute):
    run = small("llama", SAMPLES, STEPS, layers, parallel)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, mtp_num_layers=DEPTHS, **fields),
        data=dataclasses.replace(run.data, **data),
        train=dataclasses.replace(run.train, mtp_loss_scaling_factor=0.5, calculate_per_token_loss=bool(data)),
        recompute=dataclasses.replace(run.recompute, **recompute),
    )


@functools.cache
def reference(fields, data, layers):
    return assemble(pool.run(1, measured, predicting(dict(fields), dict(data), layers, {}), ParityLayout(1, 1)))


def assert_same(run, layout, expected):
    check(under(run, layout), layout.world_size)
    difference = compare(expected, assemble(pool.run(layout.world_size, measured, run, layout)))
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"


@pytest.mark.parametrize(("fields", "data", "layout", "parallel"), CASES, ids=str)
def test_the_layout_changes_nothing(fields, data, layout, parallel):
    layers = LAYERS[layout.pp > 1]
    expected = reference(tuple(fields.items()), tuple(data.items()), layers)
    assert {name for name in expected.gradients if name.startswith("mtp.layers.1.")}
    assert_same(predicting(fields, data, layers, parallel), layout, expected)


@pytest.mark.parametrize("options", [FULL, {**FULL, "recompute_method": "block"}], ids=["uniform", "block"])
def test_recomputed_layers(options):
    layout = ParityLayout(1, 1, False, 2, "1f1b")
    expected = reference(tuple(UNTIED.items()), (), LAYERS[True])
    assert_same(predicting(UNTIED, {}, LAYERS[True], {}, **options), layout, expected)


def test_alone_on_the_last_stage():
    layout = ParityLayout(1, 1, False, 2, "1f1b")
    letters = f"E{'t' * LAYERS[True]}|{'m' * DEPTHS}L"
    expected = reference(tuple(UNTIED.items()), (), LAYERS[True])
    assert_same(predicting(UNTIED, {}, LAYERS[True], {"pipeline_model_parallel_layout": letters}), layout, expected)
