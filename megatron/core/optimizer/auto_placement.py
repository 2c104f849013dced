"""Implements --optimizer-offload-policy auto: measures, decides with placement.py, and moves chunks between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron.base.log import get_logger
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OffloadSettings
from megatron.core.comm.collectives import gather_objects
from megatron.core.device import PeakMeter
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.optimizer.cpu_optimizer import CpuOptimizer
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk
from megatron.core.optimizer.placement import Candidate, Rates, delay, place
from megatron.core.optimizer.rules.table import UPDATE_RULES
from megatron.core.optimizer.update_rule import Inputs
from megatron.core.timeline import Stopwatch
from megatron.kernels.ops.update_run import UpdateRun
from megatron.spec.optimizer_state import state_bytes, state_layout

log = get_logger(__name__)
_MIB = 1024**2
_PASSES = 3  # forwards that take as long as a forward and a backward: a backward is twice the work
_REPEATS = 3
_MAX_ELEMENTS = 1 << 22  # 16 MiB per tensor, larger than every cache


class AutoPlacement:
    """Decides which chunks the CPU updates. At first it updates all.

    Every rank decides for itself, because the order in which buckets are updated does not depend on it. Only ranks with
    copies of the same states decide alike: an update by the CPU may round otherwise than one by the device.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        settings: OffloadSettings,
        cpu: CpuOptimizer,
        chunks: Sequence[OptimizerChunk],
        pool: HostPool,
        engine: CopyEngine,
        data_parallel: DataParallel,
    ) -> None:
        """Measures rates with memory of `pool`, which takes some tens of milliseconds."""
        self.meter = PeakMeter(data_parallel.device)
        self._config, self._settings, self._cpu, self._data_parallel = config, settings, cpu, data_parallel
        self._chunks = sorted(chunks, key=lambda chunk: (-chunk.bucket.index, chunk.start))  # forward order
        self._views = list({id(chunk.bucket.view): chunk.bucket.view for chunk in chunks}.values())
        self._rates: Rates | None = None
        if chunks:
            to_host, to_device = measure_bandwidth(engine, pool, data_parallel.device)
            self._rates = Rates(to_host, to_device, measure_update(config, max(chunk.size for chunk in chunks)))
        self._passes = Stopwatch(data_parallel.device)  # from the end of a step to the next gradients

    def adjust(self) -> None:
        """Moves chunks according to the memory and the time of the last forward and backward. Gradients must be final.
        Communication: see `_agreed`.

        On CUDA the host queues the update while the device is still busy with these. Then the time is that of the last
        ones that are over; steps of a run are alike.
        """
        passes, before, free = self._passes.stop(), [chunk.on_cpu for chunk in self._chunks], self.meter.free()
        after, candidates = before, []
        if passes is not None and self._rates is not None:  # a step has been measured from its beginning
            candidates = self._candidates(passes / (_PASSES * max(1, self._data_parallel.microbatches)))
            after = place(candidates, before, free, self._settings.threshold)
        after = self._agreed(after)
        if after == before or self._rates is None:
            return
        self._cpu.synchronize()
        for chunk, was_on_cpu, on_cpu in zip(self._chunks, before, after, strict=True):
            if on_cpu and not was_on_cpu:
                self._cpu.take(chunk)
            elif was_on_cpu and not on_cpu:
                self._cpu.give_back(chunk)
        if candidates:
            log.info(
                "--optimizer-offload-policy auto: %d of %d optimizer chunks offloaded to the CPU, %d before (%d MiB of "
                "the device were free; the CPU updates %.0f M elements/s, copies run at %.1f GB/s to the host and %.1f "
                "GB/s to the device: a step waits %.3f s, it waited %.3f s)",
                sum(after), len(after), sum(before), free // _MIB, self._rates.update / 1e6, self._rates.to_host / 1e9,
                self._rates.to_device / 1e9, delay(candidates, after), delay(candidates, before),
            )  # fmt: skip

    def end_step(self) -> None:
        """Call at the end of a step."""
        self._passes.start()
        self.meter.reset()

    def _agreed(self, after: list[bool]) -> list[bool]:
        """Returns the decision of the first of the ranks with copies of a chunk. Communication: where there are copies,
        a gather of a list over the replicas of each view.
        """
        agreed = list(after)
        for view in self._views:
            indices = [index for index, chunk in enumerate(self._chunks) if chunk.bucket.view is view]
            first, *_ = gather_objects([after[index] for index in indices], view.replicas)
            for index, on_cpu in zip(indices, first, strict=True):
                agreed[index] = on_cpu
        return agreed

    def _candidates(self, forward_seconds: float) -> list[Candidate]:
        """Returns the candidates of all chunks, in forward order."""
        assert self._rates is not None
        total, before, candidates = sum(chunk.size for chunk in self._chunks), 0, []
        for chunk in self._chunks:
            result = chunk.size * chunk.bucket.param_shard.itemsize
            candidates.append(
                Candidate(
                    device_bytes=state_bytes(self._config, chunk.size, half=chunk.half, on_cpu=False),
                    seconds=self._rates.seconds(chunk.size, result, overlap=self._settings.overlap),
                    slack=forward_seconds * before / total if self._settings.overlap else 0.0,
                )
            )
            before += chunk.size
        return candidates


def measure_update(config: OptimizerConfig, size: int) -> float:
    """Returns the elements per second that the CPU updates in chunks of `size` elements: the best of a few tries."""
    size = min(size, _MAX_ELEMENTS)
    values = {key: torch.zeros(size) for key in state_layout(config, half=True, on_cpu=True)}
    gradient, runs = torch.zeros(size), [UpdateRun(0, size, decay=False, decoupled=False)]
    rule = UPDATE_RULES[config.rule](config, runs)
    inputs = Inputs(step=1, lr=0.0, decoupled_lr=0.0, weight_decay=0.0, gate=torch.tensor([1.0, 0.0, 1.0]))
    best = float("inf")
    for _ in range(1 + _REPEATS):  # the first one also touches the memory for the first time
        started = time.perf_counter()
        rule.step_on_cpu(values, gradient, None, inputs)
        best = min(best, time.perf_counter() - started)
    return size / max(best, 1e-9)
