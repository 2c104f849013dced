"""The commands that the search prints: they run as printed, in the planned layout, within the planned memory."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.command_line.read import parse, words_without
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.planner.memory.plan import plan_memory
from megatron.planner.search.choices import choices_of
from megatron.planner.search.flags import command_of, flags_of
from megatron.planner.search.layout import FIELDS, Layout
from megatron.planner.search.space import space_of
from megatron.spec.sizes import Target
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


def check_command(world_size: int, layout: Layout) -> None:
    run = layout.apply(parse(TYPED, description=""))
    command = command_of([*words_without(TYPED, FIELDS), *flags_of(layout, run)], world_size, 8)
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
    table = dict(re.findall(r"^(\S+(?: \S+)*)  +(\S+(?: \S+)*)", result.stdout, re.MULTILINE))
    for name, asked in expected_rows(layout, run).items():
        assert table.get(name, "off").endswith(asked), (name, command, result.stdout)
    planned = plan_memory(run, resolve(run, mesh_of(run.parallel, world_size)), Target(cpu=True, wide=False))
    peaks = re.findall(r"\[Pipeline rank (\d+)\].* planned: ([\d.]+) \| measured: ([\d.]+)", result.stdout)
    assert [int(rank) for rank, _, _ in peaks] == list(range(layout.pp))
    for rank, of_run, measured in peaks:
        assert float(of_run) == pytest.approx(planned[int(rank)].peak / MIB, abs=0.01)
        assert float(measured) == pytest.approx(float(of_run), rel=0.03), (command, planned[int(rank)].moment)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_command_runs_as_printed(world_size):
    check_command(world_size, drawn(world_size, 0))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize("world_size", WORLDS)
def test_commands_run_as_printed(world_size, number):
    check_command(world_size, drawn(world_size, number))
