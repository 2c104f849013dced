"""examples/platform.sh: the variables of each platform -> the torchrun command; and the files of examples/ for some."""

import json
import re
import shlex

import pytest
import yaml

from tests.e2e.helpers.examples import ROOT, command_of, start

SCRIPT = "examples/llama/pretrain_llama.sh"
MOCK = ["--preset", "llama-tiny", "--data", "mock", "--lr", "1e-3", "--train-iters", 2, "--dry-run"]
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "llama-node-0-0.llama",
    "PET_MASTER_PORT": "29400",
}
PODS = {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "llama-master-0", "MASTER_PORT": "23456"}
# A job of four nodes, of which a step uses two.
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "4",
}
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_NODEID": "0"}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.5",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "6",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
SCONTROL = '#!/usr/bin/env bash\n[ "$*" != "show hostnames node[3-4]" ] || printf "node3\\nnode4\\n"\n'


def launch(folder, environment, *options):
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    return start(SCRIPT, folder, *MOCK, *options, **environment)


def meeting(nodes, gpus, master, *more, job="megatron"):
    words = ["--nproc-per-node", gpus, "--max-restarts", "0", "--nnodes", nodes, "--rdzv-backend", "c10d"]
    return [*words, "--rdzv-endpoint", master, "--rdzv-id", job, *more]


def alone(gpus, *more):
    return ["--nproc-per-node", gpus, "--max-restarts", "0", "--standalone", *more]


GUEST = ("--rdzv-conf", "is_host=0")
ELASTIC = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5"
# Pods wait longer for one another.
FIRST_POD, POD = ("--rdzv-conf", "is_host=1,read_timeout=300"), ("--rdzv-conf", "is_host=0,read_timeout=300")


@pytest.mark.parametrize(
    ("environment", "options", "line", "launcher"),
    [
        ({}, (), None, alone("8")),
        (
            PET,
            (),
            "torchrun: 2 nodes, of which this is number 1, auto processes on each; they meet at "
            "llama-node-0-0.llama:29400",
            meeting("2", "auto", "llama-node-0-0.llama:29400", *POD),
        ),
        (PET, ("--nodes", 1, "--gpus", 3), "torchrun: 1 node, 3 processes", alone("3", "--nnodes", "1")),
        (
            {
                "PET_NNODES": "1:4",
                "PET_NPROC_PER_NODE": "2",
                "PET_RDZV_ENDPOINT": "first:1",
                "PET_RDZV_BACKEND": "c10d",
            },
            (),
            "torchrun: 1:4 nodes, 2 processes on each; they meet at first:1",
            meeting("1:4", "2", "first:1", "--rdzv-conf", ELASTIC),
        ),
        # Newer training operators multiply WORLD_SIZE, and say the nodes in PET_NNODES.
        (
            PET | PODS | {"WORLD_SIZE": "16"},
            (),
            "torchrun: 2 nodes",
            meeting("2", "auto", "llama-node-0-0.llama:29400", *POD),
        ),
        (
            PODS,
            (),
            "PyTorchJob: 3 nodes, of which this is number 0, 8 ",
            meeting("3", "8", "llama-master-0:23456", *FIRST_POD),
        ),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "3"},
            ("--nodes", "2:3"),
            "Slurm: 2:3 nodes, of which this is number 1, 4 ",
            meeting("2:3", "4", "node3:29500", "--rdzv-conf", f"is_host=0,{ELASTIC}", job="17"),
        ),
        ({}, ("--nodes", "3:3", "--master", "a:1"), None, meeting("3", "8", "a:1")),
        (PODS | {"WORLD_SIZE": "1"}, ("--gpus", 4), "PyTorchJob: 1 node, 4 processes", alone("4")),
        (
            PODS | {"NPROC_PER_NODE": "2", "DLC_JOB_ID": "dlc1"},
            (),
            "PAI-DLC: 3 nodes, of which this is number 0, 2 ",
            meeting("3", "2", "llama-master-0:23456", *FIRST_POD),
        ),
        (
            PODS | {"KUBERNETES_CONTAINER_RESOURCE_GPU": "4"},
            ("--master", "other:5"),
            "PAI-DLC: 3 nodes, of which this is number 0, 4 ",
            meeting("3", "4", "other:5"),
        ),
        (
            SLURM,
            (),
            "Slurm: 2 nodes, of which this is number 1, 4 ",
            meeting("2", "4", "node3:29500", *GUEST, job="17"),
        ),
        (
            SLURM | {"MASTER_PORT": "7"},
            ("--gpus", 2),
            "Slurm: 2 nodes, of which this is number 1, 2 ",
            meeting("2", "2", "node3:7", *GUEST, job="17"),
        ),
        (BATCH, ("--nodes", 1), "Slurm: 1 node, 4 processes", alone("4")),
        (
            SKY,
            (),
            "SkyPilot: 2 nodes, of which this is number 1, 6 ",
            meeting("2", "6", "10.0.0.7:29500", "--local-addr", "10.0.0.5", *GUEST),
        ),
        # mpirun in a job of Slurm.
        (
            MPI | BATCH | {"MASTER_ADDR": "a"},
            (),
            "OpenMPI: 2 nodes, of which",
            meeting("2", "8", "a:29500", job="17"),
        ),
        (MPI, ("--master", "b:1"), "OpenMPI: 2 nodes, of which", meeting("2", "8", "b:1")),
    ],
)
def test_the_platform_says_where_the_nodes_are(environment, options, line, launcher, tmp_path):
    done = launch(tmp_path, environment, *options)
    assert done.returncode == 0, done.stderr
    *lines, command = done.stdout.splitlines()
    assert len(lines) == (line is not None) and (not lines or lines[0].startswith(line))
    assert command.startswith("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " if "--rdzv-id" in launcher else "torchrun")
    assert command_of(done.stdout)[0] == launcher


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PET_NODE_RANK": "1"}, "torchrun sets PET_NODE_RANK=1, but not PET_NNODES"),
        (PET | {"PET_NODE_RANK": ""}, "torchrun sets PET_NNODES=2, but not PET_NODE_RANK"),
        (PET | {"PET_NODE_RANK": "2"}, "torchrun's PET_NODE_RANK is 2, but nodes are numbered from 0"),
        (PET | {"PET_NODE_RANK": "a"}, "torchrun's PET_NODE_RANK must be the number of this node, not 'a'"),
        (PET | {"PET_NNODES": "all"}, "torchrun's PET_NNODES must be a number of nodes, not 'all'"),
        (PET | {"PET_NPROC_PER_NODE": "0"}, "torchrun's PET_NPROC_PER_NODE must be a number of processes, not '0'"),
        (PET | {"PET_MASTER_ADDR": ""}, "torchrun sets PET_NNODES=2, but not PET_MASTER_ADDR, where they meet"),
        (PET | {"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND is 'etcd', and the nodes meet by c10d"),
        ({"WORLD_SIZE": "2"}, "PyTorchJob sets WORLD_SIZE=2, but not RANK"),
        (PODS | {"MASTER_ADDR": ""}, "PyTorchJob sets WORLD_SIZE=3, but not MASTER_ADDR"),
        (PODS | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 with RANK and WORLD_SIZE belongs to one of several processes"),
        (BATCH, "Slurm's job has 4 nodes, but srun did not start this script"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            "SLURM_STEP_TASKS_PER_NODE is 8(x2), but a node runs one copy",
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "x"}, "'scontrol show hostnames x' names no host (no answer)"),
        (SKY | {"SKYPILOT_NODE_IPS": "10.0.0.7"}, "SKYPILOT_NODE_IPS has 1 addresses, but SKYPILOT_NUM_NODES is 2"),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, "SkyPilot's SKYPILOT_NODE_RANK is 2, but nodes are numbered from 0"),
        (MPI, "OpenMPI sets OMPI_COMM_WORLD_SIZE=2, but not MASTER_ADDR"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 8, but a node runs one copy"),
    ],
)
def test_variables_that_cannot_be_right(environment, says, tmp_path):
    done = launch(tmp_path, environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"pretrain_llama.sh: {says}") and done.stderr.count("\n") == 1


def documents(path):
    return list(yaml.safe_load_all((ROOT / "examples" / path).read_text()))


def launched(folder, words, **environment):
    """The launcher of a command of a file in examples/, with the image's and the volumes' folders at hand."""
    model = folder / "Llama-3.1-8B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({}))
    text = shlex.join(words).replace("/datasets/", f"{folder}/").replace("/opt/megatron/", "")
    command, script, *options = shlex.split(text)
    assert command == "bash"
    done = start(script, folder, *options, "--dry-run", **environment)
    assert done.returncode == 0, done.stderr
    return command_of(done.stdout)[0]


def check_pods(jobs):
    """Returns (template of a job, container) of a JobSet of one job.

    Every volume of a pod is mounted, the memory that processes share is one of them, and all pods are made anew after a
    failure, except for the exit code of a mistake.
    """
    assert jobs["failurePolicy"]["rules"] == [
        {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    (node,) = jobs["replicatedJobs"]
    job = node["template"]["spec"]
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounted.keys() == volumes.keys() and spec["restartPolicy"] == "Never"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory" and mounted["shared-memory"] == "/dev/shm"
    assert {"/datasets", "/checkpoints"} < set(mounted.values())
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert job["backoffLimit"] == 0 < jobs["failurePolicy"]["maxRestarts"]
    return node, container


def test_kubeflow_trainer(tmp_path):
    runtime, job = documents("kubernetes/trainjob.yaml")
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # Trainer changes the container `node` of the replicated job with this label.
    node, container = check_pods(runtime["spec"]["template"]["spec"])
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert container["name"] == node["name"] == "node"
    trainer = job["spec"]["trainer"]
    words = launched(tmp_path, trainer["command"] + trainer["args"], **PET | {"PET_NNODES": str(trainer["numNodes"])})
    assert words == meeting("2", "auto", "llama-node-0-0.llama:29400", *POD)


def test_jobset(tmp_path):
    (jobs,) = documents("kubernetes/jobset.yaml")
    node, container = check_pods(jobs["spec"])
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    variables = {row["name"]: row.get("value", row.get("valueFrom")) for row in container["env"]}
    assert variables["PET_NODE_RANK"] == index
    name, spec = jobs["metadata"]["name"], node["template"]["spec"]
    assert variables["PET_MASTER_ADDR"] == f"{name}-{node['name']}-0-0.{name}"
    assert variables["PET_NNODES"] == str(spec["completions"]) == str(spec["parallelism"])
    assert spec["completionMode"] == "Indexed" and jobs["spec"]["network"]["enableDNSHostnames"]
    gpus = str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert container["ports"] == [{"containerPort": int(variables["PET_MASTER_PORT"])}]
    words = launched(tmp_path, container["command"] + container["args"], **variables | {"PET_NODE_RANK": "0"})
    assert words == meeting("2", gpus, "llama-node-0-0.llama:29500", *FIRST_POD)


def test_skypilot(tmp_path):
    (task,) = documents("skypilot/pretrain.yaml")
    assert task["num_nodes"] == len(SKY["SKYPILOT_NODE_IPS"].split()) and {"/datasets", "/checkpoints"} == set(
        task["volumes"]
    )
    words = launched(tmp_path, shlex.split(task["run"]), **SKY)
    assert words[:4] == ["--nproc-per-node", "6", "--max-restarts", "3"]


def test_the_image_has_the_torch_that_is_tested():
    base = re.search(r"^FROM pytorch/pytorch:([\d.]+)-cuda", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]
    assert f"\ntorch=={base}\n" in (ROOT / "constraints.txt").read_text()
