"""--log-memory: prints the planned and the measured memory of a rank."""

from __future__ import annotations

import torch

from megatron.base.log import get_logger
from megatron.core.comm.collectives import gather_objects
from megatron.core.device import memory_report
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.planner.memory.plan import RankMemory, plan_memory
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

MIB = 1024**2
log = get_logger(__name__)


class PeakMemory:
    """The peak memory of tensors of this process since the object was made.

    On CUDA it is the caching allocator's own figure. On the CPU torch's allocations are counted (cpu_allocator.py); if
    that cannot be compiled, the growth of the resident set is used, which includes memory other than tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counter: CpuMemory | None = None
        self.source = "the caching allocator"
        if device.type == "cpu":
            try:
                self._counter, self.source = CpuMemory(), "torch's allocations"
            except OSError as error:
                self.source = f"the resident set, as allocations cannot be counted: {error}"
        self._before = 0 if device.type == "cuda" else self._most(now=True)

    def peak(self) -> int:
        """Returns the peak in bytes."""
        return self._most(now=False) - self._before

    def _most(self, *, now: bool) -> int:
        if self._counter is not None:
            return self._counter.allocated if now else self._counter.peak
        report = memory_report(self._device)
        return report.allocated if now else report.peak_allocated


class LogMemory(Callback):
    """Prints a line per pipeline rank every --log-interval steps, with the maximum over its tp,
    cp and dp neighbours."""

    def __init__(self, peak: PeakMemory) -> None:
        self._peak = peak

    def start(self, trainer: Trainer) -> None:
        """Plans the memory. Raises ConfigError for a run that cannot be planned."""
        self._planned = plan_memory(trainer.run, trainer.settings, trainer.target)
        log.info("--log-memory measures %s", self._peak.source)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Prints at the end of an interval. Communication: a gather of two numbers over the world."""
        if report.iteration % trainer.run.logging.log_interval:
            return
        peaks = gather_objects((trainer.groups.pp.rank, self._peak.peak()), trainer.groups.world)
        for planned in self._planned:
            measured = max(peak for rank, peak in peaks if rank == planned.rank)
            log.info("%s", format_line(planned, measured, report.iteration))


def format_line(planned: RankMemory, measured: int, iterations: int) -> str:
    """Formats one line; MB of 1024 x 1024 bytes."""
    return (
        f"[Pipeline rank {planned.rank}] (after {iterations} iterations) peak memory (MB) | planned: "
        f"{planned.peak / MIB:.2f} | measured: {measured / MIB:.2f} | "
        f"planned / measured: {planned.peak / measured:.3f} | planned at: {planned.moment}"
    )
