"""What a search tries: typed flags fix their axis, and --space chooses values."""

import pytest

from megatron.base.errors import ConfigError
from megatron.planner.search.layout import AXES, choices_of, default_choices, fixed_choices
from megatron.planner.search.narrow import parse_space
from tests.unit.planner.search.runs import LLAMA, RUNS, WORLD, run_of

TYPED = {
    "--tensor-model-parallel-size 2 --sequence-parallel": {"tp": (2,), "sequence_parallel": (True,)},
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": {
        "cp": (4,),
        "cp_kind": ("a2a+p2p",),
        "cp_inner": (2,),
    },
    "--cp-comm-type allgather": {"cp_kind": ("all_gather",)},
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": {"pp": (2,), "virtual_stages": (3,)},
    "--num-virtual-stages-per-pipeline-rank 3": {"virtual_stages": (3,)},
    "--pipeline-schedule zb-v --microbatch-group-size-per-virtual-pipeline-stage 4": {
        "schedule": ("zb-v",),
        "group": (4,),
    },
    "--pipeline-model-parallel-layout Et*3|t*3L": {"uneven_ends": (False,)},
    "--use-distributed-optimizer": {"sharding": ("optim",)},
    "--use-distributed-optimizer --grad-reduce-mode every-microbatch": {
        "sharding": ("optim_grads",),
        "reduce_mode": ("every-microbatch",),
    },
    "--overlapped-distributed-optimizer": {"sharding": ("optim",), "reduce_mode": ("auto",), "dp_overlap": (True,)},
    "--overlapped-distributed-optimizer --data-parallel-sharding-strategy optim_grads": {
        "sharding": ("optim_grads",),
        "reduce_mode": ("last-microbatch", "every-microbatch"),
        "dp_overlap": (True,),
    },
    "--overlap-grad-reduce": {"dp_overlap": (True,)},
    "--num-distributed-optimizer-instances 2": {"instances": (2,)},
    "--recompute-activations": {"recompute": ("core_attn",)},
    "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func": {"recompute": ("norm+mlp_act",)},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {"recompute": ("full",)},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2": {"recompute": ("full/2",)},
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": {"recompute": ("full:2",)},
    "--recompute-policy balanced --activation-memory-budget 0.5": {"recompute": ("none",)},
    "--pipeline-offload-ratio 0.3": {"offload": (0.3,)},
    "--pipeline-offload-ratio auto": {"offload": (0.0,)},
    "--cpu-offloading --cpu-offloading-num-layers 1": {"offload": (0.0,)},
    "--optimizer-cpu-offload": {"optimizer_offload": (0.5, 1.0)},
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.3": {"optimizer_offload": (0.3,)},
    "--micro-batch-size 2": {"micro_batch": (2,)},
}


@pytest.mark.parametrize("flags", TYPED)
def test_typed_flags_fix_their_axis(flags):
    assert fixed_choices(run_of(f"{LLAMA} {flags}")) == TYPED[flags]


@pytest.mark.parametrize("name", RUNS)
def test_every_axis_has_values(name):
    assert sorted(choices_of(run_of(RUNS[name]), WORLD)) == sorted(AXES)


def test_default_sizes_fit_the_model():
    found = default_choices(run_of("--preset llama3.1-405b"), 1024)
    assert found["tp"] == (1, 2, 4, 8)
    assert found["pp"] == (1, 2, 4, 8, 16, 32, 64)  # 126 layers and two ends make 128
    assert found["ep"] == (1,)
    assert default_choices(run_of("--preset moe-tiny"), 16)["ep"] == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--cp-comm-type p2p a2a p2p a2a p2p a2a", ["--cp-comm-type p2p a2a", "one value"]),
        (
            "--num-layers-per-virtual-pipeline-stage 1",
            ["--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-par"],
        ),
    ],
)
def test_flags_of_no_layout_are_refused(flags, parts):
    with pytest.raises(ConfigError) as caught:
        choices_of(run_of(f"{LLAMA} {flags}"), WORLD)
    assert all(part in str(caught.value) for part in parts)


def test_space_is_read():
    assert parse_space("") == {}
    text = "tp=1,2,4 sequence-parallel=off,on recompute=none,mlp_act+norm,full,full/1,full:8,full/2 offload=0,0.5 group=0,8"
    assert parse_space(f"{text} schedule=zb-v,1f1b") == {
        "tp": (1, 2, 4),
        "sequence_parallel": (False, True),
        "recompute": ("none", "norm+mlp_act", "full", "full:8", "full/2"),
        "offload": (0.0, 0.5),
        "group": (0, 8),
        "schedule": ("zb-v", "1f1b"),
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tpp=1", ["'tpp' is no axis", "tp, sequence_parallel"]),
        ("tp", ["tp has no values", "whole numbers from 1 on"]),
        ("tp=", ["tp has no values"]),
        ("tp=0", ["'0' is no value of tp", "whole numbers from 1 on"]),
        ("tp=two", ["'two'"]),
        ("tp=1,", ["'' is no value of tp"]),
        ("tp=1 tp=2", ["tp is given twice"]),
        ("sequence_parallel=yes", ["'yes'", "on or off"]),
        ("offload=1.5", ["'1.5'", "numbers from 0 to 1"]),
        ("offload=nan", ["'nan'"]),
        ("schedule=zb", ["'zb'", "zb-h1"]),
        ("recompute=all", ["'all'", "full:N", "core_attn"]),
        ("recompute=full:0", ["'full:0'"]),
    ],
)
def test_unknown_values_are_refused(text, parts):
    with pytest.raises(ConfigError) as caught:
        parse_space(text)
    assert all(part in str(caught.value) for part in parts)
