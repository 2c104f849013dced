"""Adapters of attention and of shared experts train the same under every layout, from a checkpoint of one process."""

import dataclasses

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare, first_gradients, trained
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from tests import pool
from tests.parallel.moe_grid import ZERO_1, ZERO_3, again, small
from tests.unit.models.builds import CPU

LIMIT, BEFORE, STEPS, LAYERS = 1e-5, 2, 3, 2
LORA = {"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": ("q_proj", "linear_fc1", "down_proj")}
ONE = ParityLayout(1, 1)
# name -> model, layout, flags. One layer of qwen2-moe is dense, and its shared expert has a gate.
CASES = {
    "ep 2 over tp": ("qwen2-moe", ParityLayout(2, 1, True, ep=2, etp=1), {}),
    "etp 2 over tp": ("deepseek", ParityLayout(2, 1, True), {}),
    "ep 2 over cp": ("deepseek", ParityLayout(1, 1, cp=2, ep=2), {}),
    "ep 2 x etp 2, ZeRO-1": ("qwen2-moe", ParityLayout(1, 4, ep=2, etp=2), ZERO_1),
    "ep 2, ZeRO-3": ("deepseek", ParityLayout(1, 2, ep=2), ZERO_3),
    "pp 2, zb-h1": ("qwen2-moe", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-h1"), {}),
    "tp 2 x pp 2": ("deepseek", ParityLayout(2, 1, True, pp=2, ep=2, etp=1), {}),
    "shared experts again": ("deepseek", ParityLayout(1, 2, ep=2), again("moe_act", "shared_experts", "norm")),
    "gated shared experts again": ("qwen2-moe", ParityLayout(2, 1, True, etp=1, ep=2), again("shared_experts")),
    "moe again over tp": ("deepseek", ParityLayout(2, 2, True, ep=4, etp=1), again("moe")),
}


def make(model, flags, files):
    run = small(model, {"lr": 1e-2, **flags}, BEFORE + STEPS, LAYERS)
    return dataclasses.replace(
        run, checkpoint=CheckpointConfig(save_interval=1000 if "save" in files else None, **files)
    )


def built(run, layout):
    run = under(run, layout)
    check(run, layout.world_size)
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    instances = data_parallel_settings(run.parallel).optimizer_instances
    return build(run, pool.groups(**sizes, instances=instances, inner=inner_size(run.parallel)), CPU)


def write(rank, size, model, folder):
    """The model, then its adapters after some steps, so that no matrix is zero."""
    save_checkpoint(built(make(model, {}, {"save": f"{folder}/base"}), ONE))
    files = {"pretrained_checkpoint": f"{folder}/base", "save": f"{folder}/adapted"}
    trainer = built(make(model, LORA, files), ONE)
    for _ in range(BEFORE):
        trainer.train_step()
    save_checkpoint(trainer)


def measured(rank, size, run, layout):
    trainer = built(run, layout)
    with first_gradients(trainer) as pieces:
        measurement = trained(trainer, STEPS)
    return dataclasses.replace(measurement, pieces=pieces).as_arrays()


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Model -> (its checkpoint with adapters, the measurements of one process)."""
    made = {}
    for model in sorted({model for model, _, _ in CASES.values()}):
        folder = str(tmp_path_factory.mktemp(model))
        pool.run(1, write, model, folder)
        run = make(model, LORA, {"load": f"{folder}/adapted"})
        made[model] = f"{folder}/adapted", assemble(pool.run(1, measured, run, ONE))
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_layout_changes_nothing(references, case):
    model, layout, flags = CASES[case]
    folder, expected = references[model]
    run = make(model, {**LORA, **flags}, {"load": folder})
    difference = compare(expected, assemble(pool.run(layout.world_size, measured, run, layout)))
    assert difference.choice is None, f"step, layer, place {difference.choice} goes to other experts"
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"
    assert difference.norm <= LIMIT and difference.balance <= LIMIT, (difference.norm, difference.balance)


@pytest.mark.parametrize("model", ["qwen2-moe", "deepseek"])
def test_shared_experts_and_dense_layers_are_trained_and_routed_experts_are_not(references, model):
    _, reference = references[model]
    layers = {
        "qwen2-moe": ("layers.0.mlp", "layers.1.mlp.shared_experts"),
        "deepseek": ("layers.1.mlp.shared_experts",),
    }
    for path in layers[model]:
        for end in ("linear_fc1.lora.gate_proj.a", "linear_fc1.lora.up_proj.b", "linear_fc2.lora.down_proj.a"):
            assert reference.gradients[f"decoder.{path}.{end}"].abs().max() > 1e-6
    assert all(".lora." in name and ".experts." not in name for name in reference.gradients)
