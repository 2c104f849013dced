"""What a step costs besides its layers: the update, copies to and from host memory, and the rest of the step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.heartbeat import Heartbeat
from megatron.base.log import muted
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.core.datasets.sample import Splits
from megatron.core.groups import Groups
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.optimizer.auto_placement import measure_update
from megatron.core.streams.streams import Streams
from megatron.core.timeline import FinishedSpan, Timeline
from megatron.planner.search.layout import Layout
from megatron.planner.time.profiled_run import run_in
from megatron.training.batch import BatchReader, BatchSource
from megatron.training.offload import build_pool_and_engine
from megatron.training.process import groups_of
from megatron.training.setup import assemble
from megatron.training.state import TrainState
from megatron.training.trainer import Trainer

_WARM_UPS, _STEPS = 4, 16  # their mean counts: see [Note: long enough on the CPU] in budget.py
_CHUNK = 1 << 22  # parameters that the CPU updates at once


@dataclass(frozen=True)
class StepRates:
    """See MachineProfile."""

    step_seconds: float
    update_parameters_per_second: float
    cpu_adam_parameters_per_second: float
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float


def measure_step(run: RunConfig, device: torch.device) -> StepRates:
    """Trains a model of one layer for some steps on this rank alone, and measures copies and the CPU's update."""
    assert run.train.micro_batch_size
    trainer = _trainer(run_in(run, Layout(micro_batch=run.train.micro_batch_size)), device)
    steps = [_step(trainer) for _ in range(_WARM_UPS + _STEPS)][_WARM_UPS:]
    computing, updating = (statistics.fmean(seconds) for seconds in list(zip(*steps, strict=True))[1:])
    parameters = sum(parameter.numel() for parameter in trainer.parameters.values())
    trainer.close()
    streams = Streams(device, Timeline(device))
    pool, engine = build_pool_and_engine(None, streams)
    to_host, to_device = measure_bandwidth(engine, pool, device)
    return StepRates(
        step_seconds=max(0.0, statistics.fmean(whole for whole, _, _ in steps) - computing - updating),
        update_parameters_per_second=parameters / updating,
        cpu_adam_parameters_per_second=measure_update(run.optimizer, _CHUNK),
        to_host_bytes_per_second=to_host,
        to_device_bytes_per_second=to_device,
    )


def _step(trainer: Trainer) -> tuple[float, float, float]:
    """Seconds of a step, of its forwards and backwards, and of its update."""
    timeline = trainer.data_parallel.timeline
    timeline.start()
    report = trainer.train_step()
    spans = timeline.stop()
    return max(report.seconds, _sum(spans, "iteration")), _sum(spans, "compute"), _sum(spans, "step")


def _sum(spans: list[FinishedSpan], row: str) -> float:
    return sum(span.stop - span.start for span in spans if span.row == row)


def _trainer(run: RunConfig, device: torch.device) -> Trainer:
    """A run of one layer without other ranks."""
    model = dataclasses.replace(run.model, num_layers=1)
    train = dataclasses.replace(run.train, train_iters=_WARM_UPS + _STEPS)
    run = dataclasses.replace(run, model=model, train=train, checkpoint=CheckpointConfig())
    heartbeat = Heartbeat(0)
    groups = groups_of(run.parallel, 1, 0, heartbeat)

    def readers(settings: RunSettings, state: TrainState) -> Splits[BatchSource | None]:
        return Splits(_reader(run, groups, device), None, None)

    with muted():
        return assemble(run, None, groups, Streams(device, Timeline(device)), readers)


def _reader(run: RunConfig, groups: Groups, device: torch.device) -> BatchReader:
    assert run.data.seq_length and run.train.micro_batch_size and run.model.vocab_size
    sample = (3, run.data.seq_length) if run.data.sft else (run.data.seq_length + 1,)
    size, ids = run.train.micro_batch_size, run.model.vocab_size

    def samples() -> Iterator[Tensor]:
        while True:
            yield (
                torch.zeros((size, *sample), dtype=torch.int64) if run.data.sft else torch.randint(ids, (size, *sample))
            )

    return BatchReader(samples(), run.data, eod=0, micro_batch_size=size, groups=groups, device=device)
