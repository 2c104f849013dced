"""The place of a process in a job: torchrun's variables, those of other launchers, and none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.base.launch import launch_environment, lone_torchrun

ROOT = Path(__file__).parents[3]
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
LAUNCHERS = {
    "srun": SRUN,
    "mpirun of Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "mpirun of MVAPICH2": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
    "mpirun": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "flux run": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_LOCAL_RANK": "0"},
}


@pytest.fixture
def environment(monkeypatch):
    """Sets exactly these variables of launchers."""

    def set_to(variables):
        for name in {*TORCHRUN, *(name for names in LAUNCHERS.values() for name in names)}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 8, 1)),
        ({**TORCHRUN, **SRUN}, (3, 8, 1)),  # torchrun on each host, which srun started
        ({"WORLD_SIZE": "1"}, (0, 1, 0)),
        ({"SLURM_NTASKS": "16"}, (0, 1, 0)),  # a shell of salloc
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (0, 1, 0)),
    ],
)
def test_the_place_of_a_process(environment, variables, place):
    environment(variables)
    assert launch_environment() == place


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_another_launcher_do_not_train_alone(environment, launcher):
    environment(LAUNCHERS[launcher])
    size, rank = list(LAUNCHERS[launcher])[:2]
    count = LAUNCHERS[launcher][size]
    with pytest.raises(ConfigError, match=re.escape(f"{launcher} has {count} processes ({size}={count})")) as error:
        launch_environment()
    assert f"RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=" in str(error.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK, LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "RANK=1 WORLD_SIZE=2 without LOCAL_RANK"),
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "WORLD_SIZE=2 LOCAL_RANK=1 without RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 WORLD_SIZE=8 LOCAL_RANK=1, which no launcher sets"),
        ({**TORCHRUN, "RANK": "x"}, "RANK=x"),
    ],
)
def test_variables_that_do_not_tell_processes_apart(environment, variables, message):
    environment(variables)
    with pytest.raises(ConfigError, match=message):
        launch_environment()


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"GROUP_WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"GROUP_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"GROUP_WORLD_SIZE": "1", "SLURM_NTASKS": "8"}, False),  # in a batch script, without srun
        ({"SLURM_STEP_NUM_TASKS": "4"}, False),
    ],
)
def test_a_torchrun_that_may_be_one_of_several_warns(environment, monkeypatch, variables, warns):
    for name in ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    environment({**TORCHRUN, **variables})
    warning = lone_torchrun()
    assert (warning is not None) == warns and (not warns or "4 trainings run beside each other" in warning)


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "finetune.py", "tools/generate.py"])
def test_a_program_under_srun_ends_at_once(program):
    variables = {name: value for name, value in os.environ.items() if name not in TORCHRUN} | SRUN
    ended = subprocess.run(
        [sys.executable, program, "--load", "x", "--prompt", "x"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and ended.stderr.startswith("error: srun has 2 processes (SLURM_NTASKS=2)")
    assert ended.stderr.count("\n") == 1
