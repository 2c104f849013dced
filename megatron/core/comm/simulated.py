"""A job of one process that takes itself for a rank of many: collectives return at once, and move nothing.

torch's fake process group is the backend. Objects that ranks gather are assumed to be equal on all of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def simulated_world(rank: int, world_size: int) -> Iterator[None]:
    """In the body this process is a rank of a job of `world_size`. One rank alone needs no process group."""
    if world_size == 1:
        yield
        return

    def gather_object(gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        gathered[:] = [value] * len(gathered)

    report_error = sys.excepthook  # which torch replaces
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    real = dist.all_gather_object
    vars(dist)["all_gather_object"] = gather_object
    try:
        yield
    finally:
        vars(dist)["all_gather_object"] = real
        dist.destroy_process_group()
        sys.excepthook = report_error


def is_collective(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher is one of torch.distributed."""
    return bool(operation.namespace == "c10d")


def collective_result(operation: Any, arguments: Sequence[Any]) -> Any:
    """Returns the result of a collective on tensors without memory: its first argument, if it has a result, and a
    work."""
    work = FakeWork().boxed()
    return work if len(operation._schema.returns) == 1 else (arguments[0], work)
