"""The start of a process on CUDA, whose answers are given by stand-ins: what is set before, and in which thread."""

import os
import threading

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.base.heartbeat import Heartbeat
from megatron.config.parallel import ParallelConfig
from megatron.training import process
from megatron.training.process import start_process
from tests.unit.base.test_heartbeat import wait_until
from tests.unit.comm.hosts import nccl, play

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


@pytest.fixture
def environment(monkeypatch):
    """None of the variables is set, and what the test sets is removed after it."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return os.environ


@pytest.fixture
def taken(monkeypatch):
    """Two GPUs. Returns (thread, device, variables that were set by then) of each call that chose one."""
    calls = []

    def set_device(device):
        calls.append((threading.current_thread().name, device, {name for name in VARIABLES if name in os.environ}))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return calls


def start(local_rank, **options):
    groups, device = start_process(ParallelConfig(**options.pop("flags", {})), 0, 1, local_rank, 2, **options)
    groups.heartbeat.stop()
    return device


def test_the_heartbeat_uses_the_device_of_its_process(environment, taken):
    """Not device 0, where its context would take memory from another rank."""
    main, device = threading.current_thread().name, torch.device("cuda", 1)
    assert start(1) == device
    wait_until(lambda: len(taken) == 2)
    assert [call[:2] for call in taken] == [(main, device), ("heartbeat", device)]


def test_variables_of_deterministic_mode(environment, taken):
    try:
        start(0, deterministic=True)
        assert taken[0][2] == set(VARIABLES), "before CUDA starts"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_variable_that_contradicts_is_this_hosts_own_mistake(environment, taken, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(ConfigError, match="NCCL_ALGO=NVLS") as caught:
        start(0, deterministic=True)
    assert caught.value.on_all_ranks is False and taken == []


@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_is_set_for_the_cpu(environment, taken, deterministic):
    try:
        assert start(0, flags={"device": "cpu"}, deterministic=deterministic).type == "cpu"
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken == [] and not any(name in environment for name in VARIABLES)


def calls_of_four_stages(monkeypatch, rank, **fields):
    """What a rank calls on NCCL."""
    monkeypatch.setattr(process, "backend_for", lambda device, asked: "nccl")
    monkeypatch.setattr(process, "connect", lambda rank, *args, **options: Heartbeat(rank))
    parallel = ParallelConfig(pipeline_model_parallel_size=4, device="cpu", **fields)
    with nccl(rank, 4) as fake:
        groups, _ = start_process(parallel, rank, 4, rank, 4)
    groups.heartbeat.stop()
    return fake.calls


def test_connections_are_opened_on_nccl(monkeypatch):
    """Between the pipeline ranks that exchange messages, in both directions."""
    for fields, pairs in (({}, 3), ({"num_virtual_stages_per_pipeline_rank": 2}, 4)):
        made = play({rank: calls_of_four_stages(monkeypatch, rank, **fields) for rank in range(4)})
        assert sum(isinstance(communicator[1], frozenset) for communicator in made) == 2 * pairs
