"""tools/check_run.py: a command is checked with every number of nodes that torchrun may have."""

import runpy
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError

SHAPE = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "64"]
DATA = ["--seq-length", "16", "--mock-data", "--tokenizer-type", "NullTokenizer"]
FLAGS = [*SHAPE, *DATA, "--micro-batch-size", "4", "--lr", "1e-3", "--train-iters", "4"]
ELASTIC = ["--elastic-world", "--global-batch-size", "8"]


@pytest.fixture(scope="module")
def run_check():
    return runpy.run_path(str(Path(__file__).parents[3] / "tools" / "check_run.py"))["run"]


def command(nodes, *flags):
    return ["--", "torchrun", "--nproc-per-node", "2", "--nnodes", nodes, "pretrain_gpt.py", *FLAGS, *flags]


def test_what_each_number_of_nodes_changes(run_check, capsys):
    run_check(command("1:4", *ELASTIC))
    micro = "in place of 4: the largest divisor with whole microbatches on"
    assert capsys.readouterr().out.splitlines() == [
        f"--nnodes 2: --micro-batch-size 2 {micro} 4 replicas",
        "--nnodes 3: --elastic-world 4 processes in place of 6 processes: a step cannot be divided among more replicas "
        "than 4; 2 wait",
        f"--nnodes 3: --micro-batch-size 2 {micro} 4 replicas",
        f"--nnodes 4: --micro-batch-size 1 {micro} 8 replicas",
    ]
    run_check(command("4", "--global-batch-size", "32"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("nodes", "flags", "lines"),
    [
        (
            "1:3",
            [*ELASTIC, "--tensor-model-parallel-size", "4"],
            ["with --nnodes 1: world size 2 is not divisible by tp 4", "; the command fits --nnodes 2, 3"],
        ),
        ("1:2", ["--global-batch-size", "8"], ["with --nnodes 2: --global-batch-size 8 is not", "fits --nnodes 1"]),
        ("1:2", ["--elastic-world"], ["--elastic-world keeps the samples"]),
        ("1:1", ["--global-batch-size", "12"], ["--global-batch-size 12 is not a multiple"]),
    ],
)
def test_sizes_that_do_not_fit(nodes, flags, lines, run_check):
    with pytest.raises(ConfigError) as error:
        run_check(command(nodes, *flags))
    message = str(error.value)
    assert message.startswith(lines[0]) and message.count("\n") == 0 and lines[-1] in message
