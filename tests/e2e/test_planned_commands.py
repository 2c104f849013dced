"""The commands that the search prints: they run as printed, in the planned layout, within the planned memory."""

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.command_line.read import parse, words_without
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.planner.memory.plan import plan_memory
from megatron.planner.search.flags import command_of, flags_of
from megatron.planner.search.layout import FIELDS, Layout, choices_of
from megatron.planner.search.space import space_of
from megatron.spec.sizes import Target
from tests.e2e.helpers.launch import run
from tests.pool import free_port

ROOT = Path(__file__).parents[2]
MIB = 1024**2
FLAGS = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 320 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 256 --vocab-size 512 "
    "--tokenizer-type NullTokenizer --mock-data --train-iters 3 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu "
    "--log-interval 3 --log-memory --global-batch-size 32"
)
TYPED = FLAGS.split()
SHARDED = {"no_shard": "off", "optim": "(ZeRO-1)", "optim_grads": "(ZeRO-2)", "optim_grads_params": "(ZeRO-3)"}
WORLDS = (1, 2, 4, 8)
EACH = 5  # layouts of a world size


def drawn(world_size: int, number: int) -> Layout:
    """Returns one of the layouts of this world size, always the same."""
    run = parse(TYPED, description="")
    wider = {"cp": tuple(size for size in (1, 2, 4) if size <= world_size), "dp_overlap": (False, True)}
    found = space_of(run, world_size, {**choices_of(run, world_size), **wider})
    return found.layout(random.Random(f"{world_size} {number}").randrange(len(found)))


def expected_rows(layout: Layout, run: RunConfig) -> dict[str, str]:
    """The rows of the start-up table, with the end of what is asked for."""
    stages = f", {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
    return {
        "tensor parallelism": f"tp {layout.tp}" if layout.tp > 1 else "off",
        "sequence parallelism": "on" if layout.sequence_parallel else "off",
        "context parallelism": f"cp {layout.cp}, {layout.cp_kind}" if layout.cp > 1 else "off",
        "pipeline": f"pp {layout.pp}, {layout.schedule}{stages}" if layout.pp > 1 else "off",
        "data-parallel sharding": SHARDED[layout.sharding],
        "activation recompute": str(run.recompute),
        "activation offload": f"{layout.offload:g} of the bytes" if layout.offload else "off",
        "optimizer offload": f"static {layout.optimizer_offload:g}" if layout.optimizer_offload else "off",
    }


def under_torchrun(command: str, folder: Path, world_size: int) -> str:
    """What the command prints, as a user starts it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def without_torchrun(command: str, folder: Path, world_size: int) -> str:
    """What its program prints, without the seconds that torchrun and Python take to start."""
    words = shlex.split(command.replace("\\\n", " "))
    result = run(words[words.index("pretrain_gpt.py") + 1 :], folder, world_size, timeout=300.0)
    assert not any(result.codes), f"{command}\n{result.text}"
    return "".join(result.stdout)


def check_command(world_size: int, layout: Layout, folder: Path, started: Callable[[str, Path, int], str]) -> None:
    of_layout = layout.apply(parse(TYPED, description=""))
    command = command_of([*words_without(TYPED, FIELDS), *flags_of(layout, of_layout)], world_size, 8)
    output = started(command, folder, world_size)
    table = dict(re.findall(r"^(\S+(?: \S+)*)  +(\S+(?: \S+)*)", output, re.MULTILINE))
    for name, asked in expected_rows(layout, of_layout).items():
        assert table.get(name, "off").endswith(asked), (name, command, output)
    settings = resolve(of_layout, mesh_of(of_layout.parallel, world_size))
    planned = plan_memory(of_layout, settings, Target(cpu=True, wide=False))
    peaks = re.findall(r"\[Pipeline rank (\d+)\].* planned: ([\d.]+) \| measured: ([\d.]+)", output)
    assert [int(rank) for rank, _, _ in peaks] == list(range(layout.pp))
    for rank, of_run, measured in peaks:
        assert float(of_run) == pytest.approx(planned[int(rank)].peak / MIB, abs=0.01)
        assert float(measured) == pytest.approx(float(of_run), rel=0.03), (command, planned[int(rank)].moment)


def test_a_command_runs_as_printed(tmp_path):
    check_command(2, drawn(2, 0), tmp_path, under_torchrun)


def test_the_program_of_a_command_runs(tmp_path):
    check_command(1, drawn(1, 0), tmp_path, without_torchrun)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize("world_size", WORLDS)
def test_commands_run_as_printed(world_size, number, tmp_path):
    check_command(world_size, drawn(world_size, number), tmp_path, under_torchrun)
