"""The device of this process and its memory figures, on CPU and CUDA alike."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron.base.errors import ConfigError

OPEN_FILES = 65536
# Dense bf16 peak, TFLOP/s, from the vendors' data sheets (no sparsity). Looked up by substring of the device's name.
PEAK_BF16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "4090": 165.0,
    "V100": 125.0,
}


@dataclass(frozen=True)
class MemoryReport:
    """Bytes: in use now, the most in use so far, the most reserved from the device, and the device's total."""

    allocated: int
    peak_allocated: int
    peak_reserved: int
    total: int


def allow_open_files() -> None:
    """Raises this process's limit of open files to the system's maximum, or to OPEN_FILES if that is less.

    Every connection of gloo and NCCL is one, a rank has some to each other rank, and shells often allow 1024. A rank
    that exceeds the limit cannot answer, and the others wait for it until their timeout.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # a system with a limit of its own: then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def choose_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of this process, and makes it the current one of this thread.

    `name` is auto, cpu, cuda or cuda:N: see `device_number`. Raises ConfigError.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise ConfigError(f"--device {name} was asked for but torch sees no CUDA device; use --device cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", device_number(name, local_rank, torch.cuda.device_count(), os.environ))
    use_device(device)
    return device


def device_number(device_name: str, local_rank: int, count: int, environment: Mapping[str, str]) -> int:
    """Returns the number of this process's CUDA device among the `count` devices that it sees.

    cuda:N is device N in every process of the host. Otherwise each process takes the device of its local rank, or the
    only one, if a scheduler has given each process a device of its own (Slurm's --gpus-per-task=1 sets
    CUDA_VISIBLE_DEVICES), or if NCCL_HOSTID shows that processes are meant to share one. Raises ConfigError.
    """
    if device_name.startswith("cuda:"):
        number = int(device_name.removeprefix("cuda:"))
        if number >= count:
            raise ConfigError(
                f"--device {device_name} does not exist: torch sees {count}; use cuda:0 to cuda:{count - 1}"
            )
        return number
    if local_rank < count:
        return local_rank
    if count == 1 and any(environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")):
        return 0
    raise ConfigError(
        f"local rank {local_rank} has no GPU: torch sees {count} on this host; lower --nproc-per-node to {count}, or "
        "let processes share a GPU with --device cuda:N"
    )


def check_shared_device(name: str, backend: str, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if NCCL would refuse the processes of this host because they use one GPU."""
    several = int(environment.get("LOCAL_WORLD_SIZE", 1)) > 1
    if name.startswith("cuda:") and backend == "nccl" and several and not environment.get("NCCL_HOSTID"):
        raise ConfigError(
            f"NCCL refuses several processes on one GPU, which --device {name} gives them; add --distributed-backend "
            "gloo, or start each process with another NCCL_HOSTID"
        )


def use_device(device: torch.device) -> None:
    """Makes a CUDA device the current one of the calling thread. A thread that asks about CUDA work without this opens
    a context on device 0, which takes hundreds of megabytes there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def with_number(device: torch.device) -> torch.device:
    """Returns the device as its tensors name it: "cuda" alone is the current device, but compares as another one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def set_cpu_threads(device: torch.device, processes_on_host: int) -> None:
    """Divides the host's cores between its processes on CPU: torch's default would use all cores in each of them.

    OMP_NUM_THREADS takes precedence. torchrun sets it to 1 for several processes, and logs it: set it to use more cores
    per process.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes_on_host))


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device (a no-op on CPU)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_report(device: torch.device) -> MemoryReport:
    """Memory of this process: the caching allocator's figures on CUDA, the resident set on CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return MemoryReport(
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
            total,
        )
    resident = psutil.Process().memory_info().rss
    peak = _peak_resident(resident)
    return MemoryReport(resident, peak, peak, psutil.virtual_memory().total)


def headroom(device: torch.device) -> int:
    """Returns the bytes that this process can still allocate.

    On CUDA this is the memory outside the peak use so far: what is free on the device or reserved by torch's allocator,
    minus 5 % for fragmentation. The device's own count contains the memory of NCCL, of cuBLAS, of contexts and of other
    processes, which torch does not see. On the CPU it is the share of this process in the host's free memory, limited
    by the control group and by its own limits (ulimit -v, -d), minus a tenth.
    """
    if device.type == "cuda":
        unused, _ = torch.cuda.mem_get_info(device)
        available = unused + torch.cuda.memory_reserved(device)
        return max(0, int(0.95 * available) - torch.cuda.max_memory_allocated(device))
    process = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available]
    limit, used = _control_group_memory()
    if limit is not None:
        free.append(limit - used)
    shared = min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    process_limits = [
        soft - held
        for kind, held in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data))
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return max(0, int(0.9 * min([shared, *process_limits])))


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak dense TFLOP/s of the device for bf16/fp16, or None when it is not known (CPU, other dtypes, other GPUs)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16_TFLOPS.items() if key in name), None)


def _control_group_memory() -> tuple[int | None, int]:
    """(limit, use) in bytes of this process's control group (v2); no limit when there is none or it cannot be read."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            group = next(line.strip().split("::")[1] for line in file if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        return (None, 0) if limit == "max" else (int(limit), int((folder / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):
        return None, 0


def _peak_resident(resident: int) -> int:
    """VmHWM of /proc/self/status: the high-water mark of the resident set, which psutil does not give."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident


class PeakMeter:
    """Measures the free memory of the device at peak use since the last `reset`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Forget the past. On CUDA this resets the allocator's own peak figures, too; on Linux those of the process."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # then the peak is that of the whole run
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: proc(5)

    def free(self) -> int:
        """Returns the free bytes; on the CPU in this process's share of the host, see `headroom`."""
        if self._device.type == "cuda":
            return headroom(self._device)
        resident = psutil.Process().memory_info().rss
        return max(0, headroom(self._device) - (_peak_resident(resident) - resident))
