"""The example scripts, as a user starts them, at toy size on two CPU processes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool import free_port

ROOT = Path(__file__).parents[2]
LLAMA = "examples/llama/pretrain_llama.sh"
TOY = (
    "--device cpu --num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --vocab-size 512 --num-workers 0 --eval-iters 0 "
    "--train-iters 4 --log-interval 1"
)
# What the two scripts use of Slurm: a list of host names, and one copy of a command a node.
SCONTROL = "#!/usr/bin/env bash\necho localhost\necho localhost\n"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in 1 2; do "$@" & done
wait -n && wait -n
"""


def script(path, folder, *flags, **settings):
    environment = {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": "llama-tiny",
        "SEQ_LENGTH": "32",
        "GLOBAL_BATCH": "4",
        "PRECISION": "",
        "OMP_NUM_THREADS": "1",
        "SAVE": str(folder / "checkpoints"),
        "SAVE_INTERVAL": "2",
        **settings,
    }
    done = subprocess.run(
        ["bash", path, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Two steps of pretrain_llama.sh under tensor parallelism, saved: (folder, output)."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, script(LLAMA, folder, *TOY.split(), "--exit-interval", "2", NPROC="2", TP="2")


def test_pretrain_llama(first_run):
    folder, output = first_run
    assert re.findall(r"iteration +(\d+)/ +4 \|", output) == ["1", "2"]
    assert re.search(r"sequence parallelism +on +on", output)
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


def test_slurm_on_two_nodes_goes_on_under_another_layout(first_run):
    folder, _ = first_run
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
        "RDZV_PORT": str(free_port()),
    }
    output = script("examples/slurm/pretrain.sbatch", folder, LLAMA, *TOY.split(), NPROC="1", **slurm)
    assert re.findall(r"iteration +(\d+)/ +4 \|", output) == ["3", "4"]
    assert re.search(r"exit_duration_in_mins \.+ (49|50)\.0", output)
    assert re.search(r"gradient reduction .*: all-reduce, \d+ buckets?, gloo", output)
