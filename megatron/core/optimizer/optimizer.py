"""The update rule on this rank's slices of the buckets, with fp32 masters where the model is in half precision.

There is one optimizer for every sharding: without sharding a slice is the whole bucket. A slice is one chunk, or
several if state is offloaded or stored in less than fp32. The device updates its chunks here, while cpu_optimizer.py
updates those of the CPU. offloaded_states.py copies offloaded states to the device for their update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.optimizer.auto_placement import AutoPlacement
from megatron.core.optimizer.cpu_optimizer import CpuOptimizer
from megatron.core.optimizer.grad_norm import Counted, global_norm, global_zeros
from megatron.core.optimizer.idle_states import IdleStates
from megatron.core.optimizer.loss_scale import LossScale
from megatron.core.optimizer.offloaded_states import OffloadedStates
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs, gate_of
from megatron.core.optimizer.weight_prefetch import WeightPrefetch
from megatron.core.parameter import ParamInfo, Section
from megatron.kernels.ops.adam import MakeAdamW
from megatron.kernels.ops.square_sum import SquareSum, square_sum
from megatron.spec.buckets import Piece
from megatron.spec.optimizer_state import chunks_to_offload, cut, is_cut, optimizer_bytes

ON_DEVICE = OffloadSettings()


@dataclass(frozen=True)
class Update:
    """The result of one step, in tensors [] of the device, which need not be known when the next step is queued."""

    applied: Tensor  # bool; False if gradients were not finite: nothing has changed then
    grad_norm: Tensor  # fp64; of the unscaled gradient, before clipping
    num_zeros: Tensor | None  # int64


class Optimizer:
    """Updates a model's parameters from reduced gradients, bucket by bucket in forward order."""

    def __init__(
        self,
        config: OptimizerConfig,
        data_parallel: DataParallel,
        groups: Groups,
        *,
        fp16: bool,
        offload: OffloadSettings = ON_DEVICE,
        make_adamw: MakeAdamW | None = None,
        squares: SquareSum = square_sum,
    ) -> None:
        """make_adamw: see OptimizerChunk. squares: the kernel of the norm, on the device.

        Raises ConfigError when --offload-dir has too little room. No communication.
        """
        self.loss_scale = LossScale(config, fp16, data_parallel.device)
        self._config, self._data_parallel, self._groups = config, data_parallel, groups
        self._device = data_parallel.device
        self._scratch = Scratch(self._device)
        self._make_adamw, self._squares = make_adamw, squares
        self._steps = 0
        self._undecided: Update | None = None  # the last one, until the host knows whether it was applied
        self.chunks = self._split(offload.chunk_size if is_cut(config, offload) else None)
        self.cpu: CpuOptimizer | None = None
        self.offloaded_states: OffloadedStates | None = None
        self._auto: AutoPlacement | None = None
        self._idle: IdleStates | None = None
        if offload.mode == UPDATE:
            self._offload_updates(offload)
        elif offload.mode == STATES:
            order = [chunk for bucket in reversed(data_parallel.buckets) for chunk in self.chunks[bucket.index]]
            engine = CopyEngine(data_parallel.streams)
            self.offloaded_states = OffloadedStates(order, self._state_pool(offload), engine, self._device)
        else:
            for chunk in self._all():
                chunk.begin(chunk.on_device(), on_cpu=False)
            self._idle = IdleStates(list(self._all()), self._host_pool())

    def states_on_host(self) -> AbstractContextManager[None]:
        """The states are in host memory in the body, in which no step runs. Not where they are offloaded anyway."""
        assert self._idle is not None
        return self._idle.on_host()

    def step(
        self, lr: float, weight_decay: float, *, decoupled_lr: float | None = None, count_zeros: bool = False
    ) -> Update:
        """Updates masters and parameters from reduced gradients, unless these are not finite, which the device decides.

        Then the same kernels and gathers run, and leave every value as it was: weights of less than fp32 are rounded
        from their masters again. The host does not wait, if `settle` was called since the last step. Communication:
        that of grad_norm.py, then the gathers.

        decoupled_lr: the learning rate of the word embeddings and of the output layer; None stands for `lr`.
        """
        scale, timeline, buckets = self.loss_scale.value, self._data_parallel.timeline, self._data_parallel.buckets
        with timeline.span("step", "gradient norm"):
            norm = self._norm(bucket.grad_shard for bucket in buckets).double() / scale
        found_inf = ~norm.isfinite()
        if not (self._config.check_for_nan_in_loss_and_grad or self.loss_scale.dynamic):
            found_inf = torch.zeros_like(found_inf)
        num_zeros = global_zeros(self._counted_gradients(), self._groups, self._device) if count_zeros else None
        clip = self._config.clip_grad
        divisor = scale * torch.where(norm > clip, norm / clip, 1.0) if clip > 0 else scale  # 1 for a NaN
        gate = gate_of(divisor, found_inf)
        inputs = Inputs(self.steps + 1, lr, lr if decoupled_lr is None else decoupled_lr, weight_decay, gate)
        if self._auto is not None:
            self._auto.adjust()
        if self.cpu is not None:
            self.cpu.start(inputs)
        local_buckets = (bucket for bucket in reversed(buckets) if self._device_chunks(bucket))
        prefetch = WeightPrefetch(local_buckets, self._reads_weights)
        for bucket in reversed(buckets):
            with timeline.span("step", bucket.label):
                self._update_on_device(bucket, prefetch, inputs)
            self._data_parallel.mark_updated(bucket, self._finish(bucket))
        self._data_parallel.end_step()
        if self._auto is not None:
            self._auto.end_step()
        self.loss_scale.update(overflow=found_inf)
        self._undecided = Update(~found_inf, norm, num_zeros)
        return self._undecided

    def drop_gradients(self) -> None:
        """Call in place of `step` when the gradients of a step shall not be used. Only copies of them that are on their
        way to the host are waited for."""
        if self.cpu is not None:
            self.cpu.drop_gradients()

    def settle(self, *, applied: bool) -> None:
        """Tells whether the last update was applied, which the caller has read from the device together with other
        numbers."""
        self._undecided = None
        self._steps += applied

    @property
    def steps(self) -> int:
        """Updates applied so far: adam's bias correction counts them. The host waits for the device, unless `settle`
        was called since the last step."""
        if self._undecided is not None:
            self.settle(applied=bool(self._undecided.applied))
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps, self._undecided = steps, None

    def params_norm(self) -> Tensor:
        """Returns the 2-norm of all parameters, fp32 [], computed from the masters. Communication: as `global_norm`."""
        self._synchronize()
        return global_norm(self._counted_masters(), self._groups, self._device, self._squares)

    def pieces(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """Yields this rank's state in fp32: (part of a parameter, key, elements [stop - start]).

        A parameter may have several parts.

        The elements are views of the state, or copies in host memory if it is stored in less than fp32: call `load`
        after writing to copies.
        """
        self._synchronize()
        for chunk in self._all():
            yield from chunk.pieces()

    def stored(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """Yields this rank's state as it is stored: (part of a parameter, key, views of the elements)."""
        self._synchronize()
        for chunk in self._all():
            yield from chunk.stored()

    def load(self, pieces: Iterable[tuple[Piece, str, Tensor]]) -> None:
        """Takes over the values that were written into `pieces`. The weights must have been loaded before."""
        by_place = {(piece.name, piece.start, key): tensor for piece, key, tensor in pieces}
        for chunk in self._all():
            chunk.load(by_place)

    def masters_from_parameters(self) -> None:
        """Computes the fp32 masters from the model's weights. Call it if weights were loaded without optimizer
        state."""
        self._synchronize()
        for chunk in self._all():
            chunk.master_from_parameters()

    @property
    def cpu_chunks(self) -> tuple[int, int]:
        """(chunks that the CPU updates, all chunks)"""
        chunks = list(self._all())
        return sum(chunk.on_cpu for chunk in chunks), len(chunks)

    @property
    def device_bytes(self) -> int:
        """Bytes of states and buffers on the device."""
        all_on_host = self.offloaded_states is not None or (self._idle is not None and self._idle.is_on_host)
        nbytes = sum(chunk.nbytes for chunk in self._all() if not (all_on_host or chunk.on_cpu))
        return nbytes + self._scratch.nbytes + (self.offloaded_states.buffer_bytes if self.offloaded_states else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of states and buffers in host memory or on disk."""
        return sum(owner.nbytes for owner in (self.cpu, self.offloaded_states, self._idle) if owner is not None)

    def _split(self, chunk_size: int | None) -> list[list[OptimizerChunk]]:
        """Returns the chunks of every bucket's slice, by the bucket's index."""
        return [
            [
                OptimizerChunk(self._config, bucket, *span, self._make_adamw)
                for span in cut(len(bucket.param_shard), chunk_size or bucket.size)
            ]
            for bucket in self._data_parallel.buckets
        ]

    def _offload_updates(self, offload: OffloadSettings) -> None:
        buffers, streams = self._host_pool(), self._data_parallel.streams
        engine = CopyEngine(streams)
        self.cpu = CpuOptimizer(self._state_pool(offload), buffers, engine, streams, overlap=offload.overlap)
        chunks = list(self._all())
        for chunk, on_cpu in zip(
            chunks, chunks_to_offload([chunk.size for chunk in chunks], offload.fraction), strict=True
        ):
            if on_cpu:
                self.cpu.take(chunk)
            else:
                chunk.begin(chunk.on_device(), on_cpu=False)
        if offload.overlap:
            self._data_parallel.when_reduced(self.cpu.send_gradients)
        if offload.is_auto:
            self._auto = AutoPlacement(self._config, offload, self.cpu, chunks, buffers, engine, self._data_parallel)

    def _host_pool(self) -> HostPool:
        return HostPool(pinned=self._device.type == "cuda")

    def _state_pool(self, offload: OffloadSettings) -> HostPool:
        if offload.directory is None:
            return self._host_pool()
        slices = [len(bucket.param_shard) for bucket in self._data_parallel.buckets]
        half = any(bucket.dtype != torch.float32 for bucket in self._data_parallel.buckets)
        needed = optimizer_bytes(slices, self._config, offload, half=half).disk
        return HostPool(pinned=False, directory=Path(offload.directory), needed=needed)

    def _device_chunks(self, bucket: Bucket) -> list[OptimizerChunk]:
        """Returns the chunks that the device updates."""
        return [chunk for chunk in self.chunks[bucket.index] if not chunk.on_cpu]

    def _reads_weights(self, bucket: Bucket) -> bool:
        """Returns whether the update reads the model weights, which it does not with fp32 masters."""
        return bucket.dtype == torch.float32 or self._config.main_params_dtype != "fp32"

    def _update_on_device(self, bucket: Bucket, prefetch: WeightPrefetch, inputs: Inputs) -> None:
        chunks = self._device_chunks(bucket)
        if not chunks:
            return
        weights = prefetch.fetch(bucket)
        for chunk in chunks:
            parameters = weights[chunk.start : chunk.stop]
            if self.offloaded_states is not None:
                self.offloaded_states.update(chunk, parameters, self._scratch, inputs)
            else:
                chunk.step(chunk.state, chunk.gradient, parameters, self._scratch, inputs)
        prefetch.store(bucket, weights, [(chunk.start, chunk.stop) for chunk in chunks])

    def _finish(self, bucket: Bucket) -> Callable[[], None] | None:
        """Returns a function that waits for the end of the bucket's update; None if the update is complete."""
        if self.cpu is None or not any(chunk.on_cpu for chunk in self.chunks[bucket.index]):
            return None
        return functools.partial(self.cpu.finish, bucket)

    def _synchronize(self) -> None:
        """Blocks the host until all states and offloaded weights are current."""
        if self.cpu is not None:
            self.cpu.synchronize()
        if self.offloaded_states is not None:
            self.offloaded_states.synchronize()
        for bucket in self._data_parallel.buckets:
            if bucket.offloaded is not None:
                bucket.offloaded.synchronize()

    def _all(self) -> Iterator[OptimizerChunk]:
        """Yields all chunks in the order of backward."""
        for chunks in self.chunks:
            yield from chunks

    def _norm(self, slices: Iterable[Tensor]) -> Tensor:
        """Returns the 2-norm of flat tensors, one per bucket's slice: fp32 []."""
        runs = [
            (counts, (bucket.view.name, tensor[start:stop]))
            for bucket, tensor in zip(self._data_parallel.buckets, slices, strict=True)
            for start, stop, counts in bucket.runs(self._counts)
        ]
        counted, copies = ([run for counts, run in runs if counts is wanted] for wanted in (True, False))
        return global_norm(counted, self._groups, self._device, self._squares, copies)

    def _counted_masters(self) -> Iterator[Counted]:
        for chunk in self._all():
            master = chunk.master()
            for start, stop, counts in chunk.bucket.runs(self._counts):
                first, last = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
                if counts and first < last:
                    yield chunk.bucket.view.name, master[first:last]

    def _counted_gradients(self) -> Iterator[Counted]:
        """Gradients that this rank counts, without padding."""
        for bucket in self._data_parallel.buckets:
            for piece in bucket.pieces:
                if self._counts(bucket.parameters[piece.name].info, bucket.section_of(piece)):
                    yield bucket.view.name, bucket.grad_shard[piece.at : piece.at + piece.stop - piece.start]

    def _counts(self, info: ParamInfo, section: Section) -> bool:
        return info.held_first(section, self._groups)
