"""Traces the set-up and the first step of one rank of a run.

Everything is the run's own code, on tensors of torch's FakeTensorMode: they have shape, dtype, device and storage, but
no memory, and an operation only computes those. The device and the other ranks are simulated
(core/streams/simulated.py, core/comm/simulated.py).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.base.heartbeat import Call, Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.core.comm.simulated import simulated_world
from megatron.core.datasets.sample import Splits
from megatron.core.expert_parallel.plan import ReadCounts, read_counts
from megatron.core.expert_parallel.simulated import balanced_counts
from megatron.core.groups import Groups
from megatron.core.streams.simulated import AssumedDevice, SimulatedStreams, simulated_cuda
from megatron.core.timeline import Timeline
from megatron.kernels.ops.attention_segments import Segments, with_lengths
from megatron.kernels.simulated_triton import simulated_triton
from megatron.schedule.validate import memory_in_flight
from megatron.training.batch import BatchReader, BatchSource
from megatron.training.dry_run.simulated_torch import SimulatedTorch
from megatron.training.dry_run.traced_memory import GRADIENTS, OPTIMIZER, PARAMETERS, TracedMemory
from megatron.training.process import groups_of
from megatron.training.setup import assemble
from megatron.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The first step of one rank.

    seconds: of the trace. operations: of torch. host_reads: how often the host waited for a value of the device.
    traffic: (group, collective) -> (calls, bytes that this rank sent). at_peak: bytes by kind when most were in use,
    which moment names. set_up: the most bytes in use before the step.
    """

    rank: int
    stage: int
    seconds: float
    operations: int
    host_reads: int
    traffic: Mapping[tuple[str, str], tuple[int, int]]
    at_peak: Mapping[str, int]
    moment: str
    set_up: int

    @property
    def peak(self) -> int:
        """The most bytes in use during the step."""
        return sum(self.at_peak.values())


def shortened(run: RunConfig, world_size: int) -> RunConfig:
    """Returns the run with the fewest microbatches per step of which its pipeline holds as many at once as of all.

    Its memory is that of the run, except for the tokens of the other microbatches.
    """
    settings = resolve(run, mesh_of(run.parallel, world_size))
    p, whole, pipeline = settings.mesh.pp, settings.batches.final_num_microbatches, settings.pipeline
    held = memory_in_flight(pipeline.schedule_of(whole))
    fewer = next((m for m in range(2 * p, whole, p) if memory_in_flight(pipeline.schedule_of(m)) == held), whole)
    assert run.train.micro_batch_size
    samples = fewer * run.train.micro_batch_size * settings.mesh.dp
    train = dataclasses.replace(
        run.train, global_batch_size=samples, rampup_batch_size=None, step_batch_size_schedule=None
    )
    return dataclasses.replace(run, train=train)


def trace(
    run: RunConfig, world_size: int, rank: int, assumed: AssumedDevice, watch: AbstractContextManager[Any] | None = None
) -> Traced:
    """Traces a rank of a run whose vocabulary is known. Weights are initialised, wherever the run itself finds them.

    watch: active during the step.
    """
    started = time.perf_counter()
    run = dataclasses.replace(run, checkpoint=CheckpointConfig())
    heartbeat, device = Heartbeat(rank), torch.device("cuda", rank % assumed.per_host)
    memory = TracedMemory(device, lambda: heartbeat.state().phase)
    with ExitStack() as simulated:
        simulated.enter_context(simulated_cuda(assumed, lambda: memory.allocated))
        simulated.enter_context(simulated_triton(assumed.capability))
        simulated.enter_context(simulated_world(rank, world_size))
        simulated.enter_context(SimulatedTorch())
        simulated.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        simulated.enter_context(memory)
        groups = groups_of(run.parallel, world_size, rank, heartbeat)
        streams = SimulatedStreams(device, Timeline(device))
        readers = _readers(run, groups, device)
        read = _reader_of_counts(run, mesh_of(run.parallel, world_size))
        trainer = assemble(run, None, groups, streams, lambda settings, state: readers, read)
        if trainer.step.features.fp8 is not None:
            trainer.step.features.fp8.skip_measuring()  # as in all steps but the first
        _label(memory, trainer)
        set_up = memory.peak
        memory.restart()
        with heartbeat.record() as calls, watch or nullcontext():
            trainer.train_step()
            trainer.data_parallel.synchronize()
        del trainer
        gc.collect()  # before host memory loses the device that it is registered with
        return Traced(
            rank=rank,
            stage=groups.pp.rank,
            seconds=time.perf_counter() - started,
            operations=memory.operations,
            host_reads=memory.host_reads,
            traffic=_traffic(calls),
            at_peak=dict(memory.top),
            moment=memory.moment,
            set_up=set_up,
        )


def _readers(run: RunConfig, groups: Groups, device: torch.device) -> Splits[BatchSource | None]:
    """Readers whose samples have a shape only."""
    assert run.data.seq_length and run.train.micro_batch_size
    sample = (3, run.data.seq_length) if run.data.sft else (run.data.seq_length + 1,)
    size = run.train.micro_batch_size

    def samples() -> Iterator[Tensor]:
        while True:
            yield torch.zeros((size, *sample), dtype=torch.int64)

    reader = BatchReader(
        samples(),
        run.data,
        eod=0,
        micro_batch_size=size,
        groups=groups,
        device=device,
        find_segments=_whole_samples,
    )
    return Splits(reader, None, None)


def _whole_samples(ids: Tensor, device: torch.device) -> Segments:
    """Returns one segment per sample. The ids [b, s] of traced samples have a shape only,
    in which nothing can be found."""
    b, t = ids.shape
    return with_lengths(ids.to(device), [t] * b)


def _reader_of_counts(run: RunConfig, mesh: Mesh) -> ReadCounts:
    """Returns a function that reads counts of tokens. They depend on values: in a trace each expert gets as many."""
    if run.model.num_experts is None:
        return read_counts
    return balanced_counts(run.model.moe_router_topk, run.model.num_experts, mesh.ep)


def _label(memory: TracedMemory, trainer: Trainer) -> None:
    """Tells the memory which tensors live through the run, and their purpose."""
    buckets, optimizer = trainer.data_parallel.buckets, trainer.optimizer
    memory.label(PARAMETERS, trainer.parameters.values())
    memory.label(PARAMETERS, (bucket.param_shard for bucket in buckets))
    memory.label(GRADIENTS, (bucket.grad_shard for bucket in buckets))
    memory.label(
        OPTIMIZER, (tensor for chunks in optimizer.chunks for chunk in chunks for tensor in chunk.state.values())
    )


def _traffic(calls: list[Call]) -> dict[tuple[str, str], tuple[int, int]]:
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for call in calls:
        counts[call.group, call.op] += 1
        sizes[call.group, call.op] += call.nbytes
    return {key: (count, sizes[key]) for key, count in counts.items()}
