"""The memory plan of runs with several ranks, against what torch allocates on each of them."""

import pytest

from megatron.tooling.memory_check import LLAMA, PARTS, PP2, RATIO, TP2, measure
from tests import pool

SMALL = "--hidden-size 128 --ffn-hidden-size 320 --num-attention-heads 4 --seq-length 128"
# Messages and reductions that are under way are a few tensors more or less: the 3 % hold for all of it.
RUNS = {
    "tp, sequence parallel, bf16": (2, f"{TP2} --sequence-parallel --bf16 --num-layers 2"),
    "tp, one group": (2, f"{TP2} --bf16 --num-layers 2 --group-query-attention --num-query-groups 1"),
    "all_gather, attention dropout": (
        2,
        "--bf16 --num-layers 2 --seq-length 512 --attention-dropout 0.1 --context-parallel-size 2 --cp-comm-type all_gather",
    ),
    "1f1b, norms again": (2, f"{PP2} --global-batch-size 8 --kaimm-recompute-norm"),
    "1f1b, parts that move": (2, f"{PP2} --global-batch-size 8 {PARTS} mlp_fc1 mlp_act mlp_fc2"),
    "gpipe, half of all moves": (
        2,
        f"{PP2} --global-batch-size 8 --pipeline-schedule gpipe --num-layers 4 {RATIO} 0.5",
    ),
    "zb-h1": (2, f"{PP2} --global-batch-size 8 --pipeline-schedule zb-h1 --num-layers 8"),
    "ZeRO-1, overlapped": (
        2,
        "--bf16 --num-layers 2 --overlapped-distributed-optimizer --grad-reduce-mode last-microbatch",
    ),
    "tp, interleaved": (
        4,
        f"{TP2} {PP2} --global-batch-size 8 --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel",
    ),
}


SLOW = ("tp, interleaved",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RUNS])
def test_planned_is_measured(name):
    world_size, flags = RUNS[name]
    ranks = pool.run(world_size, measure, f"{LLAMA} {SMALL} {flags}")
    assert len(ranks) == world_size
    for found in ranks:
        assert found.planned.peak == pytest.approx(found.peak, rel=0.03), (found.pp_rank, found.planned.moment)
