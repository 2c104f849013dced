"""tools/plan.py time: what it prints, that it agrees with the other commands, and how it refuses."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.planner.search.layout import Layout
from megatron.planner.search.memory_bounds import MemoryBounds
from megatron.planner.time.constants import blind_error
from megatron.planner.time.hardware import GB, GIB, used_memory
from megatron.spec.sizes import FUSED_GPU
from megatron.tooling.plan.run import settings_of
from tests.unit.planner.models import LLAMA_FLAGS as FLAGS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def plan():
    spec = importlib.util.spec_from_file_location("plan", ROOT / "tools" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *flags: module.main(list(map(str, flags)))


def test_time(plan, capsys):
    assert plan("time", "--cluster", "h100:2x8", *FLAGS) == 0
    out = capsys.readouterr().out
    assert "on 16 h100" in out and "gemm" in out and "MFU: model FLOPs" in out
    assert f"within {blind_error():g} % by constants" in out and 0 < blind_error() < 20


def test_all_say_the_same_about_memory(plan, capsys):
    """The commands time and memory, and the plan of a search; hidden states go through dropout in none."""
    flags = (*FLAGS, "--hidden-dropout", 0, "--attention-dropout", 0, "--no-overlap-p2p-communication")
    assert plan("time", "--cluster", "h100:2x8", *flags) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory "))
    assert plan("memory", "--world-size", 16, *flags) == 0
    ranks = re.findall(r"rank \d: most, ([0-9.]+) MiB", capsys.readouterr().out)
    run, _ = settings_of([str(word) for word in flags], 16, description="")
    layout = Layout(tp=2, sequence_parallel=True, pp=2, sharding="optim", dp_overlap=True)
    (found,) = MemoryBounds(run, 16, FUSED_GPU).exact([layout])
    assert max(ranks, key=float) == f"{found.device / 2**20:.1f}"
    assert shown.startswith(f"memory {found.device / GB:.1f} GB of tensors on pipeline rank 0, the fullest")
    assert f"{used_memory(found.device) / GB:.1f} GB: fits {80 * GIB / GB:.1f} GB" in shown


ANSWERS = (
    "--preset llama3-8b --seq-length 4096 --rollout-max-response-len 3072 --micro-batch-size 1 --bf16 --train-iters 9 "
    "--lr 1e-6 --perform-rl-step --prompt-data x --rm-type number --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --use-distributed-optimizer --tensor-model-parallel-size 2 "
    "--sequence-parallel --grpo-prompts-per-step 256"
)


def test_a_step_that_samples(plan, capsys):
    """The batch that the line names fits, and one more answer does not; phases add up."""
    assert plan("time", "--cluster", "h100:1x8", "--response-lengths", 800, *ANSWERS.split()) == 0
    out = capsys.readouterr().out
    assert "for 2048 answers of 800 tokens on average, the longest 3072" in out
    shares = [float(share) for share in re.findall(r"([0-9.]+)%", out)]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=0.3)
    assert "of which the cache of 512 answers of 4096 tokens takes 137.4 GB" in out
    fits = int(re.search(r"give --rl-generation-batch-size (\d+) or less", out).group(1))
    for slots, verdict in ((fits, "fits 85.9"), (fits + 1, "does not fit 85.9")):
        assert plan("time", "--cluster", "h100:1x8", *ANSWERS.split(), "--rl-generation-batch-size", slots) == 0
        assert verdict in capsys.readouterr().out
    assert plan("memory", "--world-size", 8, *ANSWERS.split()) == 0
    out = capsys.readouterr().out
    assert all(f"most in {phase}" in out for phase in ("sampling", "log-probabilities", "training step"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cluster", "h100", "--response-lengths", 9, *FLAGS), "--response-lengths 9 has no effect"),
        (("--cluster", "h1000", *FLAGS), "unknown device 'h1000'"),
        (("--cluster", "h100:1x3", *FLAGS), "world size 3"),
        (("--cluster", "h100:1x8", "--world-size", 16, *FLAGS), "a world of 16 ranks does not fit"),
        (("--cluster", "a100", "--fp8-format", "e4m3", *FLAGS), "a100 has no fp8 products"),
        (
            ("--cluster", "h100", *FLAGS, "--pipeline-model-parallel-size", 10**12),
            "must be from 1 to 1000000, got",
        ),
        (("--cluster", "h100", "--use-checkpoint-args", "--load", "/x", *FLAGS[2:]), "must be given, or"),
        (("--cluster", "/nowhere.toml", *FLAGS), "No such file"),
    ],
)
def test_bad_input(plan, capsys, flags, message):
    assert plan("time", *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_it_starts_without_torch():
    code = (
        "import runpy, sys; sys.argv = ['plan.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "time", "--cluster", "h100:2x8", *map(str, FLAGS)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
