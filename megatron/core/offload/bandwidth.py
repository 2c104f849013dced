"""Measures how fast this machine copies between device and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.stream import Work

_PROBE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}
_REPEATS = 3


def measure_bandwidth(engine: CopyEngine, pool: HostPool, device: torch.device) -> tuple[float, float]:
    """Bytes per second to the host and to the device, each direction alone: the best of three copies. Blocks the
    host."""
    on_device = torch.empty(_PROBE_BYTES.get(device.type, 1 << 22), dtype=torch.uint8, device=device).fill_(1)
    block = pool.take(on_device.numel())
    on_host = block.bytes[: on_device.numel()]

    def best(start: Callable[[], Work]) -> float:
        seconds = []
        for _ in range(1 + _REPEATS):  # the first one also touches the pages
            begun = time.perf_counter()
            start().synchronize()
            seconds.append(time.perf_counter() - begun)
        return on_device.numel() / min(seconds[1:])

    rates = (
        best(lambda: engine.to_host("probe", [(on_device, on_host)], block)),
        best(lambda: engine.to_device("probe", [(on_host, on_device)], block)),
    )
    pool.discard(block)
    return rates
