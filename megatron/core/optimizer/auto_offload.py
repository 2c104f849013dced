"""--optimizer-offload-policy auto: measures, asks placement.py, and moves chunks between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron.base.log import get_logger
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OffloadSettings
from megatron.core.device import PeakMeter
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.optimizer.chunks import Chunk
from megatron.core.optimizer.far_memory import HostMemory
from megatron.core.optimizer.far_updates import FarUpdates
from megatron.core.optimizer.placement import Candidate, delay, place
from megatron.core.optimizer.rates import measure_rates
from megatron.spec.optimizer_state import state_bytes

log = get_logger(__name__)
_MIB = 1024**2
_PASSES = 3  # forwards that a forward and backward take: backward is twice the work


class AutoOffload:
    """All chunks begin far. Each rank decides for itself: buckets are published in one order, wherever chunks are."""

    def __init__(
        self,
        config: OptimizerConfig,
        settings: OffloadSettings,
        far: FarUpdates,
        chunks: Sequence[Chunk],
        host: HostMemory,
        data_parallel: DataParallel,
    ) -> None:
        """Measures rates: some tens of milliseconds."""
        self.meter = PeakMeter(data_parallel.device)
        self._config, self._settings, self._far, self._data_parallel = config, settings, far, data_parallel
        self._chunks = sorted(chunks, key=lambda chunk: (-chunk.bucket.index, chunk.start))  # forward order
        largest = max((chunk.size for chunk in chunks), default=0)
        self._rates = measure_rates(config, host, data_parallel.device, largest) if largest else None
        self._ended: float | None = None

    def replace(self) -> None:
        """Move chunks if the step that has just gone forward and backward says so. Its gradients are complete."""
        if self._ended is None or self._rates is None:
            return  # no step has been measured from its beginning
        passes = time.perf_counter() - self._ended
        candidates = self._candidates(passes / (_PASSES * max(1, self._data_parallel.microbatches)))
        before, free = [chunk.is_far for chunk in self._chunks], self.meter.free()
        after = place(candidates, before, free, self._settings.threshold)
        if after == before:
            return
        self._far.settle()
        for chunk, was_far, is_far in zip(self._chunks, before, after, strict=True):
            if is_far and not was_far:
                self._far.take(chunk)
            elif was_far and not is_far:
                self._far.give_back(chunk)
        log.info(
            "--optimizer-offload-policy auto: %d of %d chunks are far now, %d before (%d MiB of the device were free; "
            "the CPU updates %.0f M elements/s, copies out %.1f GB/s, in %.1f GB/s: a step waits %.3f s, it waited %.3f s)",
            sum(after), len(after), sum(before), free // _MIB, self._rates.update / 1e6, self._rates.out / 1e9,
            self._rates.into / 1e9, delay(candidates, after), delay(candidates, before),
        )  # fmt: skip

    def end_step(self) -> None:
        """What happens from now on is the next step."""
        self._ended = time.perf_counter()
        self.meter.reset()

    def _candidates(self, forward_seconds: float) -> list[Candidate]:
        """In forward order."""
        assert self._rates is not None
        total, before, found = sum(chunk.size for chunk in self._chunks), 0, []
        for chunk in self._chunks:
            result = chunk.size * chunk.bucket.param_shard.itemsize
            found.append(
                Candidate(
                    device_bytes=state_bytes(self._config, chunk.size, half=chunk.half, far=False),
                    seconds=self._rates.seconds(chunk.size, result, overlap=self._settings.overlap),
                    slack=forward_seconds * before / total if self._settings.overlap else 0.0,
                )
            )
            before += chunk.size
        return found
