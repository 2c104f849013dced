"""Flags of other programs that ask for what a run does anyway, or under another name."""

import pytest

from megatron.command_line.read import read

PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 64"
)
EXPERTS = " --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 64"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--num-key-value-heads 2", {"num_query_groups": 2, "group_query_attention": True}),
        ("--use-llama2-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--wandb-name mine", {"wandb_exp_name": "mine"}),
        ("--eval-iters -1", {"eval_iters": 0}),
        ("--exit-duration-in-mins 30000000", {"exit_duration_in_mins": 3e7}),
        ("--num-experts 0", {"num_experts": None}),
        (EXPERTS + " --moe-expert-capacity-factor -1.0", {"moe_expert_capacity_factor": None}),
        (EXPERTS + " --fix-router", {"moe_router_force_load_balancing": True}),
        (
            EXPERTS + " --enable-shared-expert --shared-moe-ffn-hidden-size 32",
            {"moe_shared_expert_intermediate_size": 32},
        ),
        ("--expert-tensor-parallel-size 2", {"expert_tensor_parallel_size": None}),
        ("--rank 3 --dist-url tcp://host:1234 --use-mpi", {}),
    ],
)
def test_it_means(typed, meant):
    line = read((PLAIN + " " + typed).split())
    assert not line.problems
    assert {name: line.run.value(name) for name in meant} == meant


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        ("--disable-last-saving", "--disable-last-saving"),
        ("--bf16 --fp8-format hybrid --fp8-param-gather", "--fp8-param-gather"),
    ],
)
def test_a_row_of_the_start_up_table_says_what_is_done_instead(typed, flag):
    line = read((PLAIN + " " + typed).split())
    assert not line.problems and flag in [note.flag for note in line.run.notes]
