"""Devices and clusters as data: rates, sizes, and which ranks share a node.

Rates are those of the data sheets, of dense products, and the best rate of large matrix products that was measured in
public (github.com/stas00/ml-engineering, compute/accelerator). A rate of a link is in one direction.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.base.errors import ConfigError, shown
from megatron.base.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from megatron.config.interval import RANKS
from megatron.planner.time.constants import Number

GB, GIB, TERA = 10**9, 2**30, 10**12
BF16, FP8, MXFP8 = "bf16", "fp8", "mxfp8"
PRECISIONS = (BF16, FP8, MXFP8)
# Device memory that no tensor requests: CUDA's context, communicators, libraries, and what the allocator cannot use.
_OUTSIDE, _LOST = 3.0 * GB, 0.04


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator.

    architecture: devices of one architecture run kernels with the same efficiency. peak: FLOP/s of dense products, by
    precision. reached: FLOP/s of the best large product, where it was measured, and else of the devices of its
    architecture. memory: bytes. bandwidth: bytes/s of the memory. link: bytes/s to another device of its node.
    processors: streaming multiprocessors. domain: devices of a node in its usual server. exponentials: rate of
    attention compared with other devices of the architecture, which have fewer units for exponentials.
    """

    name: str
    architecture: str
    peak: Mapping[str, float]
    reached: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    processors: int
    domain: int = 8
    exponentials: float = 1.0

    def share(self, precision: str) -> float:
        """Returns the part of the peak that the best product reached."""
        kind = FP8 if precision == MXFP8 else precision
        return self.reached[kind] / self.peak[kind]

    def flops(self, precision: str) -> float:
        """Returns FLOP/s of dense products. Raises ConfigError if the device has no such products."""
        kind = FP8 if precision == MXFP8 else precision
        if kind not in self.peak:
            raise ConfigError(
                f"{self.name} has no {precision} products, only {', '.join(self.peak)}; give another precision"
            )
        return self.peak[kind]


def _device(
    name: str,
    architecture: str,
    bf16: float,
    fp8: float | None,
    memory: float,
    bandwidth: float,
    link: float,
    processors: int,
    reached: tuple[float, float | None],
    domain: int = 8,
    exponentials: float = 1.0,
) -> Device:
    rates = {BF16: bf16 * TERA} if fp8 is None else {BF16: bf16 * TERA, FP8: fp8 * TERA}
    reached_rates = (
        {BF16: reached[0] * TERA} if reached[1] is None else {BF16: reached[0] * TERA, FP8: reached[1] * TERA}
    )
    return Device(
        name=name,
        architecture=architecture,
        peak=rates,
        reached=reached_rates,
        memory=memory * GIB,
        bandwidth=bandwidth * GB,
        link=link * GB,
        processors=processors,
        domain=domain,
        exponentials=exponentials,
    )


# TFLOP/s, GB, GB/s; a device that is sold with 80 GB has about 80 GiB. Where no product was measured, the share of
# the peak is that of the nearest device of the architecture, times the square root of the ratio of their power
# limits: large products run at the limit, and power grows at least with the square of the clock. So h100-500w (500 of
# 700 W) follows from h100, and gb300 (1.4 of 1.2 kW) from gb200. B300 has twice the units for exponentials of B200,
# which limit attention there; 1.4 is the square root of that.
DEVICES = {
    device.name: device
    for device in (
        _device("v100", "volta", 125, None, 32, 900, 150, 80, (109, None)),
        _device("a100", "ampere", 312, None, 80, 2039, 300, 108, (271, None)),
        _device("a100-40", "ampere", 312, None, 40, 1555, 300, 108, (271, None)),
        _device("a800", "ampere", 312, None, 80, 2039, 200, 108, (271, None)),
        _device("h100", "hopper", 989, 1979, 80, 3352, 450, 132, (795, 1403)),
        _device("h100-500w", "hopper", 989, 1979, 96, 2400, 450, 132, (672, 1186)),
        _device("h100-pcie", "hopper", 756, 1513, 80, 2000, 300, 114, (608, 1073), 2),
        _device("h100-nvl", "hopper", 835, 1671, 94, 3900, 300, 132, (671, 1185), 2),
        _device("h800", "hopper", 989, 1979, 80, 3352, 200, 132, (795, 1403)),
        _device("h200", "hopper", 989, 1979, 141, 4800, 450, 132, (795, 1454)),
        _device("h20", "hopper", 148, 296, 96, 4000, 450, 78, (139, 278)),
        _device("gh200", "hopper", 989, 1979, 96, 4000, 450, 132, (829, 1535)),
        _device("b200", "blackwell", 2250, 4500, 180, 7700, 900, 148, (1745, 3433)),
        _device("b300", "blackwell", 2250, 4500, 270, 7700, 900, 148, (1769, 3353), 8, 1.4),
        _device("gb200", "blackwell", 2500, 5000, 186, 8000, 900, 148, (1822, 3616), 72),
        _device("gb300", "blackwell", 2500, 5000, 279, 8000, 900, 148, (1968, 3906), 72, 1.4),
        _device("l40s", "ada", 362, 733, 48, 864, 25, 142, (315, 638)),
        _device("mi300x", "cdna3", 1307, 2615, 192, 5300, 448, 304, (668, 1336)),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    node: devices of one node, which reach each other at the device's link. network: bytes/s per device to other nodes.
    host: bytes/s between a device and the memory of its host. host_memory: bytes of main memory of a node; host_rate:
    bytes/s of it. nodes: None if the number follows from the run.
    """

    device: Device
    node: int
    network: float
    host: float = 25.0 * GB
    host_memory: float = 1024.0 * GIB
    host_rate: float = 400.0 * GB
    nodes: int | None = None

    def check(self, world_size: int) -> None:
        """Raises ConfigError for more ranks than devices."""
        if self.nodes is not None and world_size > self.nodes * self.node:
            raise ConfigError(
                f"a world of {world_size} ranks does not fit {self.nodes} nodes of {self.node} {self.device.name}, "
                f"which are {self.nodes * self.node} devices; lower the world size or give more nodes"
            )


# GB/s per device in common servers of an architecture (DGX A100, DGX H100, GB200 NVL72).
_NETWORK = {"volta": 12.5, "ampere": 25.0, "hopper": 50.0, "blackwell": 50.0, "ada": 25.0, "cdna3": 50.0}
_HOST = {"volta": 12.0, "ampere": 25.0, "ada": 25.0}
# GiB of main memory per device. DGX-1 has 512 GB for 8 devices, DGX A100 1 TB (or 2), DGX H100 and DGX B200 2 TB,
# common servers of 8 MI300X 2 TB, and of 4 L40S 384 GB. A Grace processor has 480 GB, for one GH200 or for two GB200 or
# GB300.
_HOST_MEMORY = {"volta": 64.0, "ampere": 128.0, "hopper": 256.0, "blackwell": 256.0, "ada": 96.0, "cdna3": 256.0}
_GRACE_MEMORY = {"gh200": 447.0, "gb200": 223.0, "gb300": 223.0}
# GB/s of main memory per device, of the data sheets of the same servers: 8 channels of DDR4-2400 in DGX-1, 16 of
# DDR4-3200 in DGX A100, 16 of DDR5-4800 in DGX H100 and with L40S, 16 of DDR5-5600 in DGX B200, 24 of DDR5-4800 with
# MI300X. Grace has 512 GB/s.
_HOST_RATE = {"volta": 19.2, "ampere": 51.2, "hopper": 76.8, "blackwell": 89.6, "ada": 153.6, "cdna3": 115.2}
_GRACE_RATE = {"gh200": 512.0, "gb200": 256.0, "gb300": 256.0}
_DIGITS = 8  # more than the largest number of ranks has
_NAME = re.compile(r"([a-z0-9-]+)(?::([0-9]+)x([0-9]+))?")


def built_in(name: str) -> Cluster:
    """Returns the cluster of a name such as h100 or h100:32x8, 32 nodes of 8. Raises ConfigError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"--cluster {name} is neither a file nor a name such as h100:32x8, 32 nodes of 8 devices")
    device = device_named(match.group(1))
    nodes, node = None, device.domain
    if match.group(2):
        nodes, node = (int(digits[:_DIGITS]) for digits in match.group(2, 3))
    if not (RANKS.holds(node) and (nodes is None or RANKS.holds(nodes))):
        raise ConfigError(f"--cluster {shown(name)}: nodes and devices of a node must be {RANKS.words}")
    return Cluster(
        device=device,
        node=node,
        network=_NETWORK[device.architecture] * GB,
        host=_HOST.get(device.architecture, 55.0) * GB,
        host_memory=node * _GRACE_MEMORY.get(device.name, _HOST_MEMORY[device.architecture]) * GIB,
        host_rate=node * _GRACE_RATE.get(device.name, _HOST_RATE[device.architecture]) * GB,
        nodes=nodes,
    )


def device_named(name: str) -> Device:
    """Returns a built-in device. Raises ConfigError with the names."""
    if name not in DEVICES:
        raise ConfigError(
            f"unknown device {shown(name)}; known are {', '.join(DEVICES)}; a cluster file may give its numbers"
        )
    return DEVICES[name]


def used_memory(requested: Number) -> Number:
    """Returns bytes of device memory in use when tensors request so many."""
    return requested * (1 + _LOST) + _OUTSIDE


def requested_memory(used: float) -> float:
    """Returns how many bytes tensors may request so that `used` bytes of device memory are in use; see
    `used_memory`."""
    return (used - _OUTSIDE) / (1 + _LOST)


def stride(mesh: Mesh, axis: str) -> int:
    """Returns the distance of neighbours along an axis, in ranks."""
    axes = EXPERT_AXES if axis in EXPERT_AXES and axis != "pp" else DENSE_AXES
    return math.prod(mesh.size(other) for other in axes[: axes.index(axis)])


@dataclass(frozen=True)
class Place:
    """Where the ranks of a group are: its size, and how many of them share a node."""

    size: int
    together: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.together)


def place(mesh: Mesh, cluster: Cluster, axes: tuple[str, ...]) -> Place:
    """Returns where the ranks are that vary along `axes`, neighbouring axes of one view, the fastest first."""
    step = stride(mesh, axes[0])
    size = math.prod(mesh.size(axis) for axis in axes)
    return Place(size, max(1, min(size, cluster.node // step)))


def with_device(cluster: Cluster, **changes: float) -> Cluster:
    """Returns the cluster with other numbers of its device."""
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **changes))  # type: ignore[arg-type]
