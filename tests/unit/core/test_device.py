"""Devices, threads and memory figures on a machine without a GPU; CUDA's answers are given by stand-ins."""

import multiprocessing
import resource
from types import SimpleNamespace

import psutil
import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.core.device import (
    PEAK_BF16_TFLOPS,
    PeakMeter,
    allow_open_files,
    check_shared_device,
    choose_device,
    device_number,
    headroom,
    memory_report,
    peak_tflops,
    set_cpu_threads,
    synchronize,
    with_number,
)

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs; the list of devices that were set."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class TestChoose:
    @pytest.mark.parametrize("asked", ["auto", "cpu"])
    def test_without_gpu(self, asked, no_gpu):
        assert choose_device(asked, local_rank=3) == CPU

    def test_cuda_without_gpu(self, no_gpu):
        with pytest.raises(ConfigError, match="--device cuda was asked for but torch sees no CUDA device"):
            choose_device("cuda", 0)

    @pytest.mark.parametrize("asked", ["auto", "cuda"])
    def test_with_gpus(self, asked, gpus):
        assert choose_device(asked, 1) == torch.device("cuda", 1)
        assert gpus == [torch.device("cuda", 1)]

    def test_cpu_with_gpus(self, gpus):
        assert choose_device("cpu", 1) == CPU and gpus == []

    def test_more_processes_than_gpus(self, gpus):
        with pytest.raises(ConfigError, match="local rank 2 has no GPU: torch sees 2 on this host; lower"):
            choose_device("auto", 2)

    def test_all_processes_on_one_gpu(self, gpus):
        assert [choose_device("cuda:1", local_rank) for local_rank in (0, 3)] == [torch.device("cuda", 1)] * 2
        with pytest.raises(ConfigError, match="--device cuda:2 does not exist: torch sees 2; use cuda:0 to cuda:1"):
            choose_device("cuda:2", 0)

    def test_a_number_without_gpu(self, no_gpu):
        with pytest.raises(ConfigError, match="--device cuda:0 was asked for but torch sees no CUDA device"):
            choose_device("cuda:0", 0)


class TestNumber:
    @pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"])
    def test_a_scheduler_gives_each_process_one_gpu(self, name):
        """Slurm's --gpus-per-task=1: local rank 3 sees one device, and it is its own."""
        assert device_number("auto", 3, 1, {name: "3"}) == 0

    @pytest.mark.parametrize(
        ("count", "environment"), [(1, {}), (1, {"CUDA_VISIBLE_DEVICES": ""}), (2, {"NCCL_HOSTID": "a"})]
    )
    def test_too_few_gpus(self, count, environment):
        with pytest.raises(ConfigError, match=f"local rank 3 has no GPU: torch sees {count} on this host"):
            device_number("auto", 3, count, environment)

    def test_own_gpu_first(self):
        assert device_number("cuda", 1, 2, {"CUDA_VISIBLE_DEVICES": "4,6"}) == 1


@pytest.mark.parametrize(
    ("asked", "backend", "environment"),
    [
        ("cuda:0", "gloo", {"LOCAL_WORLD_SIZE": "2"}),
        ("cuda:0", "nccl", {"LOCAL_WORLD_SIZE": "2", "NCCL_HOSTID": "rank-1"}),
        ("cuda:0", "nccl", {"LOCAL_WORLD_SIZE": "1"}),
        ("cuda:0", "nccl", {}),
        ("cuda", "nccl", {"LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_processes_that_may_share_a_gpu_or_do_not(asked, backend, environment):
    check_shared_device(asked, backend, environment)


def test_nccl_refuses_processes_that_share_a_gpu():
    with pytest.raises(ConfigError, match="NCCL refuses several processes on one GPU, which --device cuda:0 gives"):
        check_shared_device("cuda:0", "nccl", {"LOCAL_WORLD_SIZE": "2"})


def test_a_device_is_named_as_its_tensors_name_it(monkeypatch):
    """Else no tensor is on the device that was asked for, and nothing is offloaded."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert torch.device("cuda") != torch.device("cuda", 3), "torch's rule, which makes this necessary"
    assert with_number(torch.device("cuda")) == torch.device("cuda", 3)
    assert with_number(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_number(CPU) == CPU


class TestThreads:
    @pytest.fixture
    def threads(self, monkeypatch):
        """Eight cores and no OMP_NUM_THREADS; the list of what was set."""
        found = []
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        monkeypatch.setattr(torch, "set_num_threads", found.append)
        return found

    @pytest.mark.parametrize(("processes", "each"), [(1, 8), (2, 4), (3, 2), (16, 1)])
    def test_cores_are_shared(self, threads, processes, each):
        set_cpu_threads(CPU, processes)
        assert threads == [each]

    def test_the_environment_wins(self, threads, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        set_cpu_threads(CPU, 2)
        assert threads == []

    def test_not_on_cuda(self, threads):
        set_cpu_threads(torch.device("cuda"), 2)
        assert threads == []


class TestMemory:
    def test_cpu(self):
        before = memory_report(CPU)
        held = torch.ones(50_000_000, dtype=torch.uint8)  # 50 MB, touched
        after = memory_report(CPU)
        assert after.allocated - before.allocated > 40_000_000
        slack = 5_000_000  # the kernel updates the two counters in batches
        assert after.peak_allocated > after.allocated - slack and after.peak_reserved == after.peak_allocated
        del held
        released = memory_report(CPU)
        assert released.allocated < after.allocated - 40_000_000
        assert released.peak_allocated > after.allocated - slack, "the peak stays"
        assert 0 < released.allocated < released.total

    def test_cuda(self, monkeypatch):
        for name, value in (("memory_allocated", 1), ("max_memory_allocated", 2), ("max_memory_reserved", 3)):
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4))
        report = memory_report(torch.device("cuda"))
        assert (report.allocated, report.peak_allocated, report.peak_reserved, report.total) == (1, 2, 3, 4)


class TestPeak:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("NVIDIA H100 80GB HBM3", 989.0),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H200", 989.0),
            ("NVIDIA H20", 148.0),
            ("NVIDIA B200", 2250.0),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA L40S", 362.0),
            ("NVIDIA L4", 121.0),
            ("Some other GPU", None),
        ],
    )
    def test_by_name(self, monkeypatch, name, expected):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert peak_tflops(torch.device("cuda"), torch.bfloat16) == expected

    def test_unknown_is_none(self):
        assert peak_tflops(CPU, torch.bfloat16) is None
        assert peak_tflops(torch.device("cuda"), torch.float32) is None

    def test_a_longer_name_comes_first(self):
        """The first key that is part of the name wins."""
        keys = list(PEAK_BF16_TFLOPS)
        for number, key in enumerate(keys):
            assert not any(earlier in key for earlier in keys[:number]), f"{key} can never be found"


def test_synchronize_on_cpu_does_nothing():
    synchronize(CPU)


class TestHeadroom:
    def test_is_a_share_of_the_free_memory(self, monkeypatch):
        monkeypatch.setattr("megatron.core.device._control_group_memory", lambda: (None, 0))
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert headroom(CPU) == 225

    @pytest.mark.parametrize(("limit", "used", "left"), [(700, 100, 540), (700, 900, 0)])
    def test_a_control_groups_limit_counts(self, limit, used, left, monkeypatch):
        monkeypatch.setattr("megatron.core.device._control_group_memory", lambda: (limit, used))
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert headroom(CPU) == left

    def test_ulimit_counts(self, monkeypatch):
        free = headroom(CPU)
        held = psutil.Process().memory_info().vms
        monkeypatch.setattr(
            "resource.getrlimit", lambda kind: (held + 10**8, -1) if kind == resource.RLIMIT_AS else (-1, -1)
        )
        assert 0 < headroom(CPU) <= 0.9 * 10**8 < free

    @pytest.mark.parametrize(
        ("free", "left"),
        [
            (600, 650),  # a device of 1000: torch has reserved 400, of which 300 were in use at the peak
            (500, 555),  # NCCL and cuBLAS have 100
            (0, 80),
        ],
    )
    def test_cuda_leaves_what_the_peak_and_libraries_left(self, free, left, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 400)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300)
        cuda = torch.device("cuda", 0)
        assert headroom(cuda) == PeakMeter(cuda).free() == left


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    """In a process of its own: a limit cannot be given back."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def work():
        for soft, hard in ((64, 3000), (64, 2000), (40, 40)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            allow_open_files()
            found.put(resource.getrlimit(resource.RLIMIT_NOFILE))

    process = context.Process(target=work)
    process.start()
    assert [found.get() for _ in range(3)] == [(3000, 3000), (2000, 2000), (40, 40)]
    process.join()
