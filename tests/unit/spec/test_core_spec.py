"""Attention between its projections as data: values may have other channels than queries and keys."""

import dataclasses

from megatron.planner.search.layout import default_choices
from megatron.planner.search.search import Planner, search
from megatron.planner.search.space import space_of
from megatron.planner.time.constants import fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import built_in
from megatron.planner.time.software import Software
from megatron.spec.attention import CoreSpec
from megatron.spec.decoder import decoder_spec
from tests.unit.narrow_values import narrow_values
from tests.unit.planner.models import LLAMA, run_of

CORE = CoreSpec(heads=16, groups=4, qk_dim=192, v_dim=128, window=None, scale=0.1, softcap=None, dropout=0.0)


def test_operations_are_those_of_scores_and_of_values():
    assert CORE.multiply_adds(4096) == 16 * (192 + 128) * 4096 / 2
    assert dataclasses.replace(CORE, window=1024).multiply_adds(4096) == 16 * (192 + 128) * (1024 - 1024**2 / 8192)
    assert CORE.head_dim == 160 and (CORE.local_groups(8), CORE.group_holders(8)) == (1, 2)


def test_projections_have_the_channels_of_the_core():
    model = run_of(LLAMA, 4096, 32).model
    with narrow_values():
        attention = decoder_spec(model).layers[0].attention
    core, q = attention.core, model.num_attention_heads // model.num_kv_heads
    assert core.v_dim == core.qk_dim // 2
    assert attention.linear_qkv.out_shape == (core.groups, (q + 1) * core.qk_dim + core.v_dim)
    assert attention.linear_proj.in_features == core.heads * core.v_dim


def best_layout():
    run, cluster = run_of(LLAMA, 4096, 32), built_in("h100:1x8")
    few = {"cp": (1, 2), "recompute": ("none", "core_attn"), "offload": (0.0,), "optimizer_offload": (0.0,)}
    few |= {"instances": (1,), "micro_batch": (1, 2), "tp": (2,), "schedule": ("1f1b",)}
    planner = Planner(run, 8, cluster, Software(), DataSheetClock(fitted(), cluster))
    return search(planner, space_of(run, 8, {**default_choices(run, 8), **few}), 1).best[0]


def test_a_search_finds_such_a_model_faster_and_smaller():
    whole = best_layout()
    with narrow_values():
        narrow = best_layout()
    assert narrow.layout == whole.layout
    assert narrow.seconds < whole.seconds and narrow.memory < whole.memory
    attention = (narrow.time.parts["attention"], whole.time.parts["attention"])
    assert attention[0] < attention[1] and attention[0] > 0.7 * attention[1]
