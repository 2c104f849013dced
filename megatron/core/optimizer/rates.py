"""How fast this machine copies and updates: measured once, for the cost model of placement.py."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.device import synchronize
from megatron.core.optimizer.far_memory import HostMemory
from megatron.core.optimizer.placement import Rates
from megatron.core.optimizer.update_rule import Inputs, Run, update

_REPEATS = 3
_MOST = 1 << 22  # elements: 16 MiB a tensor, past every cache


def measure_rates(config: OptimizerConfig, host: HostMemory, device: torch.device, size: int) -> Rates:
    """Rates of chunks of `size` elements; the best of a few tries each. Seconds of work in total, at most."""
    size = min(size, _MOST)
    held = host.take(dict.fromkeys(("gradient", "master", "exp_avg", "exp_avg_sq"), (size, torch.float32))).tensors
    for tensor in held.values():
        tensor.zero_()
    near, far = torch.zeros(size, device=device), held["gradient"]
    inputs = Inputs(step=1, lr=0.0, decoupled_lr=0.0, weight_decay=0.0, divisor=1.0)
    runs = [Run(0, size, decay=False, decoupled=False)]
    copied = 4 * size
    return Rates(
        out=copied / _seconds(device, lambda: far.copy_(near, non_blocking=True)),
        into=copied / _seconds(device, lambda: near.copy_(far, non_blocking=True)),
        update=size / _seconds(device, lambda: update(config, runs, held, far, None, inputs)),
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(1 + _REPEATS):  # the first one also touches the memory for the first time
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)
