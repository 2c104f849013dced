"""The systems of this project, and compute without communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.cluster.systems import BETAS, CLIP, EPS, FP32, LR, WEIGHT_DECAY, System, make_model, mean_loss, share
from megatron.base.mesh import Mesh
from megatron.config.data_parallel import AUTO, EVERY, LAST, DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups, create_groups
from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.batch import Batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep

BUCKET = 1_000_000  # elements
CPU = torch.device("cpu")
TIMEOUT_SECONDS = 600.0


class ComputeOnly(System):
    """Forward and backward without communication or update: the minimum time of a step. Records the times of both."""

    title = "compute only"

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._model = make_model(groups)
        alone = create_groups(Mesh.create(1), 0, groups.heartbeat, TIMEOUT_SECONDS)
        self._data_parallel = DataParallel(self._model, alone, DataParallelSettings(), CPU)
        self._seconds: tuple[list[float], list[float]] = ([], [])

    def step(self, batches: Sequence[Batch]) -> float:
        """Runs the microbatches as training does, but without the loss across ranks and without an update."""
        self._data_parallel.begin_step(len(batches))
        total = 0.0
        for batch in batches:
            started = time.perf_counter()
            loss = mean_loss(self._model, batch)
            half = time.perf_counter()
            (loss / len(batches)).backward()
            self._seconds[0].append(half - started)
            self._seconds[1].append(time.perf_counter() - half)
            total += float(loss.detach())
        return total / len(batches)

    def take_seconds(self) -> tuple[float, float]:
        """Returns (forward, backward) seconds of one microbatch, medians since the last call."""
        forward, backward = (statistics.median(times) for times in self._seconds)
        self._seconds = ([], [])
        return forward, backward

    def memory(self) -> int:
        """Bytes of the gradients."""
        return FP32 * sum(bucket.size for bucket in self._data_parallel.buckets)

    def wire_bytes(self, accumulation: int) -> float:
        """Zero, because nothing is communicated."""
        return 0.0


class Ours(System):
    """The training loop's own step, with given settings of data parallelism."""

    settings: DataParallelSettings

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        instances = self.settings.optimizer_instances
        own = create_groups(groups.mesh, groups.rank, groups.heartbeat, TIMEOUT_SECONDS, optimizer_instances=instances)
        model = make_model(own)
        self._data_parallel = DataParallel(model, own, self.settings, CPU)
        self._optimizer = Optimizer(optimizer_config(), self._data_parallel, own, fp16=False)
        timers = Timers(0, lambda: None)
        self._step = TrainStep(model, self._data_parallel, self._optimizer, own, timers, per_token=False)

    def step(self, batches: Sequence[Batch]) -> float:
        """Runs one step; with overlap, parameters may still be in flight afterwards."""
        loss = self._step.forward_backward(batches).read()
        self._step.update(LR, WEIGHT_DECAY)
        return loss

    def finish(self) -> None:
        """Waits for parameters."""
        self._data_parallel.synchronize()

    def memory(self) -> int:
        """Bytes of gradients, communication buffers and moments."""
        return self._data_parallel.gradient_bytes() + self._optimizer.device_bytes

    def wire_bytes(self, accumulation: int) -> float:
        """A reduce-scatter (once per step, or per microbatch) and an all-gather of the padded buckets."""
        reductions = 1 if self._data_parallel.keeps_grads else accumulation
        return (reductions + 1) * share(self.groups) * FP32 * sum(b.size for b in self._data_parallel.buckets)


class PlainAllReduce(Ours):
    """One all-reduce per bucket after the backward; every rank updates everything."""

    title = "ours plain all-reduce"
    settings = DataParallelSettings(bucket_size=BUCKET)


class Serial(Ours):
    """--use-distributed-optimizer."""

    title = "ours serial"
    settings = DataParallelSettings(shards="optim", bucket_size=BUCKET)


class Overlapped(Ours):
    """--overlapped-distributed-optimizer."""

    title = "ours overlapped"
    settings = DataParallelSettings(
        shards="optim", mode=AUTO, overlap_reduce=True, overlap_gather=True, bucket_size=BUCKET
    )


class OverlappedLast(Ours):
    """The same with --grad-reduce-mode last-microbatch."""

    title = "ours overlapped, last-microbatch"
    settings = DataParallelSettings(
        shards="optim", mode=LAST, overlap_reduce=True, overlap_gather=True, bucket_size=BUCKET
    )


class OverlappedEvery(Ours):
    """The same with --grad-reduce-mode every-microbatch."""

    title = "ours overlapped, every-microbatch"
    settings = DataParallelSettings(
        shards="optim", mode=EVERY, overlap_reduce=True, overlap_gather=True, bucket_size=BUCKET
    )


def optimizer_config() -> OptimizerConfig:
    """Returns the settings of every system."""
    return OptimizerConfig(
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad=CLIP
    )
