"""The command line of a layout: read again, it is the run in that layout."""

import random
import shlex

import pytest

from megatron.command_line.read import parse, words_without
from megatron.config.rules.check import problems
from megatron.planner.search.flags import command_of, flags_of
from megatron.planner.search.layout import FIELDS, Layout
from megatron.planner.search.space import space_of
from tests.unit.planner.search.runs import EVERY_RUN, LLAMA, RUNS, VALUES, WORLD, run_of


@pytest.mark.parametrize("name", RUNS)
def test_words_make_the_run_in_its_layout(name):
    argv = f"{RUNS[name]} {EVERY_RUN}".split()
    run, draw = run_of(RUNS[name]), random.Random(name)
    found = space_of(run, WORLD, {**VALUES, "group": (0,), "offload": (0.0, 0.5), "micro_batch": (2,), "cp": (1, 2)})
    for number in draw.sample(range(len(found)), 10):
        layout = found.layout(number)
        again = parse(words_without(argv, FIELDS) + flags_of(layout, run), description="")
        assert again == layout.apply(run)
        assert problems(again, WORLD) == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), "--micro-batch-size 1"),
        (
            Layout(tp=2, sequence_parallel=True, micro_batch=2, sharding="optim", dp_overlap=True),
            "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2 --use-distributed-optimizer "
            "--overlap-grad-reduce --overlap-param-gather",
        ),
        (
            Layout(sharding="optim_grads", reduce_mode="every-microbatch", dp_overlap=True),
            "--micro-batch-size 1 --data-parallel-sharding-strategy optim_grads --overlap-param-gather",
        ),
        (
            Layout(pp=2, schedule="interleaved", virtual_stages=3, group=4),
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
            "--microbatch-group-size-per-virtual-pipeline-stage 4 --micro-batch-size 1",
        ),
        (
            Layout(pp=2, schedule="zb-v", virtual_stages=2, offload=0.25),
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --micro-batch-size 1 --pipeline-offload-ratio "
            "0.25",
        ),
        (Layout(recompute="core_attn"), "--micro-batch-size 1 --recompute-granularity selective"),
        (
            Layout(recompute="full:4", optimizer_offload=0.5),
            "--micro-batch-size 1 --recompute-granularity full --recompute-method block --recompute-num-layers 4 "
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        ),
        (
            Layout(cp=4, cp_kind="a2a+p2p", cp_inner=2),
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
            "--micro-batch-size 1",
        ),
    ],
)
def test_words_are_the_fewest(layout, words):
    assert flags_of(layout, run_of(LLAMA)) == words.split()


def test_words_of_the_user_stay_as_they_are():
    typed = "--lr=1e-4 --tp-comm-overlap --seq_length 2e2 --no-load-optim --kaimm-recompute-norm --num-layers 4"
    assert " ".join(words_without(typed.split(), FIELDS)) == "--lr=1e-4 --seq_length 2e2 --no-load-optim --num-layers 4"


def test_an_alias_of_several_flags_keeps_those_of_no_layout():
    assert words_without(["--checkpoint-activations", "--bf16"], FIELDS) == ["--bf16"]


def test_command_is_one_of_the_shell():
    words = ["--preset", "llama-tiny", "--data-path", "my data", "--lr", "1e-4", "--tensor-model-parallel-size", "2"]
    one = command_of(words, 4, 8)
    assert one.startswith("torchrun --nproc-per-node 4 pretrain_gpt.py \\\n")
    assert shlex.split(one.replace("\\\n", "")) == ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *words]
    many = shlex.split(command_of(words, 256, 8).replace("\\\n", ""))
    assert many[: many.index("pretrain_gpt.py")] == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 32 --node-rank $NODE_RANK --master-addr $MASTER_ADDR"
    )
    assert max(map(len, command_of(words * 9, 256, 8).splitlines()[1:])) <= 110
