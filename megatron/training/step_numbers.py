"""The numbers of a step: one copy to the host, which is read when the next step is under way.

[Note: one read per step]
The host queues work for the device and goes on. It would wait if it read the loss of a step before it queues the next
one, and the device would have nothing to do until the host has caught up. So the device decides whether a step is
applied (Optimizer.step), and puts all that the host wants to know about the step into one tensor. Its copy is read one
step later, between the next forward and backward and the next update. By then the device has long finished it, and
still has work. The update needs the numbers at that point: the learning rate and the count of updates stand still after
a step that was not applied. `is_due` of callbacks says which steps are read at once:
those after which the run is saved or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.streams.host_copy import HostCopy
from megatron.training.step import Objective


class StepNumbers:
    """Named tensors on their way to the host, in one copy as fp64, which holds fp32 and whole numbers exactly."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """All on one device; the copy begins behind what is queued on its current stream."""
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._copy = HostCopy(torch.cat([tensor.double().flatten() for tensor in tensors.values()]))

    def read(self) -> dict[str, list[float]]:
        """Returns the numbers of each tensor, flat, when they are there."""
        numbers, values = iter(self._copy.read()), {}
        for name, size in self._sizes.items():
            values[name] = [next(numbers) for _ in range(size)]
        return values


@dataclass(frozen=True)
class PendingStep:
    """A step that was queued, and the part of its report that the host knows by itself; see StepReport.

    objective: None for a step that only read its batch. started: by the clock of performance counters.
    """

    iteration: int
    samples: int
    rows: int
    consumed_samples: int
    started: float
    timers: dict[str, float]
    objective: Objective | None
    numbers: StepNumbers
