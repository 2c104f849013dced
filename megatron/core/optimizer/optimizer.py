"""AdamW or SGD on this rank's slices of the buckets, with fp32 masters where the model is in half precision.

One optimizer for every sharding: a slice is the whole bucket when nothing is sharded. A slice is one chunk; with offload, or
state that is stored in less than fp32, it is cut into several. Chunks whose state is near are stepped by the device here;
far_updates.py steps those of the CPU meanwhile, and parked.py brings state that waits far away to the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.optimizer.auto_offload import AutoOffload
from megatron.core.optimizer.chunks import Chunk
from megatron.core.optimizer.far_memory import DiskMemory, HostMemory
from megatron.core.optimizer.far_updates import FarUpdates
from megatron.core.optimizer.grad_norm import global_norm, global_zeros
from megatron.core.optimizer.loss_scale import LossScale
from megatron.core.optimizer.parked import ParkedStates
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs
from megatron.core.optimizer.visits import Visits
from megatron.core.parameter import ParamInfo, Section
from megatron.spec.buckets import Piece
from megatron.spec.optimizer_state import cut, first_far, is_cut, optimizer_bytes

ON_DEVICE = OffloadSettings()


@dataclass(frozen=True)
class Update:
    """What one step did. `applied` is False when gradients were not finite; nothing was changed then."""

    applied: bool
    grad_norm: float  # of the unscaled gradient, before clipping
    num_zeros: int | None


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
    ) -> None:
        """Raises ConfigError when --offload-dir cannot hold what it has to. No communication."""
        self.loss_scale = LossScale(config, fp16)
        self._config, self._data_parallel, self._groups = config, data_parallel, groups
        self._device = data_parallel.device
        self._scratch = Scratch(self._device)
        self.steps = 0  # updates applied so far: adam's bias correction counts them
        self.chunks = self._cut(offload.chunk_size if is_cut(config, offload) else None)
        self.far: FarUpdates | None = None
        self.parked: ParkedStates | None = None
        self._auto: AutoOffload | None = None
        if offload.mode == UPDATE:
            self._offload_updates(offload)
        elif offload.mode == STATES:
            order = [chunk for bucket in reversed(data_parallel.buckets) for chunk in self.chunks[bucket.index]]
            self.parked = ParkedStates(order, self._memory(offload), self._device)
        else:
            for chunk in self._all():
                chunk.begin(chunk.on_device(), far=False)

    def step(
        self, lr: float, weight_decay: float, *, decoupled_lr: float | None = None, count_zeros: bool = False
    ) -> Update:
        """Update masters and parameters from reduced gradients. Communication: grad_norm.py; then the gathers.

        decoupled_lr: the learning rate of the word embeddings and of the output layer; None: `lr`.
        """
        scale, timeline, buckets = self.loss_scale.value, self._data_parallel.timeline, self._data_parallel.buckets
        with timeline.span("step", "gradient norm"):
            norm = self._norm(bucket.grad_shard for bucket in buckets) / scale
        if not math.isfinite(norm) and (self._config.check_for_nan_in_loss_and_grad or self.loss_scale.dynamic):
            self.loss_scale.update(overflow=True)
            if self.far is not None:
                self.far.discard()
            return Update(False, norm, None)
        num_zeros = global_zeros(self._counted_gradients(), self._groups, self._device) if count_zeros else None
        clip = self._config.clip_grad
        divisor = scale * max(1.0, norm / clip) if clip > 0 else scale
        inputs = Inputs(self.steps + 1, lr, lr if decoupled_lr is None else decoupled_lr, weight_decay, divisor)
        if self._auto is not None:
            self._auto.replace()
        if self.far is not None:
            self.far.start(inputs)
        visits = Visits((bucket for bucket in reversed(buckets) if self._near(bucket)), self._reads_weights)
        for bucket in reversed(buckets):
            with timeline.span("step", bucket.label):
                self._step_near(bucket, visits, inputs)
            self._data_parallel.publish(bucket, self._finish(bucket))
        self._data_parallel.end_step()
        if self._auto is not None:
            self._auto.end_step()
        self.steps += 1
        self.loss_scale.update(overflow=False)
        return Update(True, norm, num_zeros)

    def params_norm(self) -> float:
        """2-norm of all parameters (of the masters). Communication as `global_norm`."""
        self._settle()
        return global_norm(self._counted_masters(), self._groups, self._device)

    def pieces(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """This rank's state by parameter, fp32: (piece, key, its elements [stop - start]). A parameter may have several.

        Views of the state, or copies in host memory where it is stored in less: after writing into those call `load`.
        """
        self._settle()
        for chunk in self._all():
            yield from chunk.pieces()

    def load(self, pieces: Iterable[tuple[Piece, str, Tensor]]) -> None:
        """Make what was written into `pieces`, and the weights that were loaded beside them, the state."""
        by_place = {(piece.name, piece.start, key): tensor for piece, key, tensor in pieces}
        for chunk in self._all():
            chunk.load(by_place)

    def masters_from_parameters(self) -> None:
        """Rebuild the fp32 masters from the model's weights, after weights were loaded without optimizer state."""
        self._settle()
        for chunk in self._all():
            chunk.master_from_parameters()

    def parameters_from_masters(self) -> None:
        """Round the masters into this rank's slices of the model's weights."""
        self._settle()
        for chunk in self._all():
            chunk.parameters_from_master()

    @property
    def far_chunks(self) -> tuple[int, int]:
        """(chunks that the CPU updates, all)"""
        chunks = list(self._all())
        return sum(chunk.is_far for chunk in chunks), len(chunks)

    @property
    def device_bytes(self) -> int:
        """Of state on the device, and of its buffers there."""
        here = sum(chunk.nbytes for chunk in self._all() if self.parked is None and not chunk.is_far)
        return here + self._scratch.nbytes + (self.parked.staging_bytes if self.parked else 0)

    @property
    def far_bytes(self) -> int:
        """Of state away from the device, and of what is on its way."""
        return sum(owner.nbytes for owner in (self.far, self.parked) if owner is not None)

    def _cut(self, chunk_size: int | None) -> list[list[Chunk]]:
        """The chunks of every bucket's slice, by the bucket's index."""
        return [
            [Chunk(self._config, bucket, *each) for each in cut(len(bucket.param_shard), chunk_size or bucket.size)]
            for bucket in self._data_parallel.buckets
        ]

    def _offload_updates(self, offload: OffloadSettings) -> None:
        host = self._host()
        self.far = FarUpdates(self._memory(offload), host, self._device, overlap=offload.overlap)
        chunks = list(self._all())
        for chunk, is_far in zip(chunks, first_far([chunk.size for chunk in chunks], offload.far), strict=True):
            if is_far:
                self.far.take(chunk)
            else:
                chunk.begin(chunk.on_device(), far=False)
        if offload.overlap:
            self._data_parallel.when_reduced(self.far.send_gradients)
        if offload.is_auto:
            self._auto = AutoOffload(self._config, offload, self.far, chunks, host, self._data_parallel)

    def _host(self) -> HostMemory:
        return HostMemory(pinned=self._device.type == "cuda")

    def _memory(self, offload: OffloadSettings) -> HostMemory | DiskMemory:
        if offload.directory is None:
            return self._host()
        slices = [len(bucket.param_shard) for bucket in self._data_parallel.buckets]
        half = any(bucket.dtype != torch.float32 for bucket in self._data_parallel.buckets)
        return DiskMemory(offload.directory, optimizer_bytes(slices, self._config, offload, half=half).disk)

    def _near(self, bucket: Bucket) -> list[Chunk]:
        """The chunks that the device updates."""
        return [chunk for chunk in self.chunks[bucket.index] if not chunk.is_far]

    def _reads_weights(self, bucket: Bucket) -> bool:
        """Whether an update needs the weights, which otherwise its masters are."""
        return bucket.dtype == torch.float32 or self._config.main_params_dtype != "fp32"

    def _step_near(self, bucket: Bucket, visits: Visits, inputs: Inputs) -> None:
        chunks = self._near(bucket)
        if not chunks:
            return
        weights = visits.enter(bucket)
        for chunk in chunks:
            parameters = weights[chunk.start : chunk.stop]
            if self.parked is not None:
                self.parked.update(chunk, parameters, self._scratch, inputs)
            else:
                chunk.step(chunk.state, chunk.gradient, parameters, self._scratch, inputs)
        visits.leave(bucket, weights, [(chunk.start, chunk.stop) for chunk in chunks])

    def _finish(self, bucket: Bucket) -> Callable[[], None] | None:
        """What completes the bucket's update; None when it is complete."""
        if self.far is None or not any(chunk.is_far for chunk in self.chunks[bucket.index]):
            return None
        return functools.partial(self.far.finish, bucket)

    def _settle(self) -> None:
        """All state is current, wherever it is, and so are weights in far memory."""
        if self.far is not None:
            self.far.settle()
        if self.parked is not None:
            self.parked.settle()
        for bucket in self._data_parallel.buckets:
            if bucket.home is not None:
                bucket.home.settle()

    def _all(self) -> Iterator[Chunk]:
        """In the order of backward."""
        for chunks in self.chunks:
            yield from chunks

    def _norm(self, slices: Iterable[Tensor]) -> float:
        """2-norm of flat tensors, one of each bucket's slice."""
        buckets = self._data_parallel.buckets
        counted = (
            tensor[start:stop]
            for bucket, tensor in zip(buckets, slices, strict=True)
            for start, stop, counts in bucket.runs(self._counts)
            if counts
        )
        return global_norm(counted, self._groups, self._device)

    def _counted_masters(self) -> Iterator[Tensor]:
        for chunk in self._all():
            master = chunk.master()
            for start, stop, counts in chunk.bucket.runs(self._counts):
                first, last = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
                if counts and first < last:
                    yield master[first:last]

    def _counted_gradients(self) -> Iterator[Tensor]:
        """Gradients that this rank counts, without padding."""
        for bucket in self._data_parallel.buckets:
            for piece in bucket.pieces:
                if self._counts(bucket.parameters[piece.name].info, bucket.section_of(piece)):
                    yield bucket.grad_shard[piece.at : piece.at + piece.stop - piece.start]

    def _counts(self, info: ParamInfo, section: Section) -> bool:
        return info.held_first(section, self._groups)
