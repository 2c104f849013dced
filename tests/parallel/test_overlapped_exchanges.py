"""A forward that runs together with the backward of another microbatch changes no bit of losses and gradients."""

import dataclasses

import pytest

from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.moe_grid import CHUNKS, FULL, PER_TOKEN, ZERO_1, ZERO_2, again, layers_of, small
from tests.parallel.test_moe_layouts import measured

STEPS = 3
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# name -> model, layout, flags
CASES = {
    "one stage": ("deepseek-v3", ParityLayout(1, 2, ep=2), {**DROPOUT, **again("moe", "mla_up_proj", "norm")}),
    "whole layers recomputed, etp 2": ("qwen2-moe", ParityLayout(2, 1, True), {**FULL, **DROPOUT}),
    "cp 2, per-token loss": ("deepseek", ParityLayout(1, 1, cp=2, ep=2, comm_type="a2a"), PER_TOKEN),
    "gathered keys": ("deepseek-v2-lite", ParityLayout(1, 1, cp=2, ep=2, comm_type="all_gather"), FULL),
    "ep 4, ZeRO-2": ("deepseek", ParityLayout(2, 2, True, ep=4, etp=1), {**ZERO_2, **again("shared_experts")}),
    "pp 2": ("deepseek-v2-lite", ParityLayout(1, 2, pp=2, ep=2), ZERO_1),
    "pp 2, interleaved": ("mixtral", ParityLayout(1, 2, pp=2, ep=2, schedule="interleaved", chunks=2), {}),
    "pp 2, zb-h1": ("deepseek-v3", ParityLayout(2, 1, True, pp=2, schedule="zb-h1"), again("moe_act")),
    "chunks, pp 2, zb-h1": (
        "deepseek-v3",
        ParityLayout(2, 1, True, pp=2, schedule="zb-h1"),
        {**again("moe"), **CHUNKS, **DROPOUT},
    ),
    "pp 2, zb-v": ("olmoe", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-v"), ZERO_1),
}


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes(case):
    model, layout, flags = CASES[case]
    runs = [
        small(model, {**flags, "overlap_moe_expert_parallel_comm": hidden}, STEPS, layers_of(layout, flags))
        for hidden in (False, True)
    ]
    dropout = {name: flags.get(name, 0.0) for name in DROPOUT}
    runs = [dataclasses.replace(run, model=dataclasses.replace(run.model, **dropout)) for run in runs]
    for run in runs:
        check(under(run, layout), layout.world_size)
    alone, together = (assemble(pool.run(layout.world_size, measured, run, layout)) for run in runs)
    difference = compare(alone, together)
    assert difference.choice is None and difference.same_biases
    assert (difference.loss, difference.gradient, difference.norm, difference.balance) == (0.0, 0.0, 0.0, 0.0)
