"""Unshards parameters that are sharded over ranks or offloaded to the host ahead of their use, and frees them after it.

Ranks gather each other's shards (ZeRO-3: Rajbhandari et al., arXiv 1910.02054; ahead of use as Zhao et al., FSDP, arXiv
2304.11277), or shards are copied from host memory, or both: each rank copies its shard, then ranks gather.

[Note: when buckets are unsharded] Forward. A bucket is unsharded when one of its parameters is first read, and held
until the innermost module that read it ends. Meanwhile the bucket that forward reads next is prefetched, if it belongs
to the same pipeline stage. The bucket that was released last stays until another one is read, because the next module
may lie in the same bucket. Backward. Before a module's backward the buckets that it read are unsharded again, and the
next one in backward order is prefetched. A bucket is freed when the gradients of all its parameters were computed or
deferred, because its values are not needed after that. Only the bucket that forward reads first stays for the next
microbatch, if the rank has one stage: its gather could not be overlapped with any computation of that forward. Buckets
that a recomputation reads in backward are held as if backward had reached them, which it does next. Freed values have
not changed, so they are not written back; an update writes to the shard itself. Freed parameters are empty, so reading
one without the hook fails loudly. Memory comes from PyTorch's allocator and not from a pool: a view that autograd saved
keeps its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.read_hooks import register_read_hook
from megatron.core.parameter import Parameter
from megatron.core.streams.stream import Work

_PREFETCHED = 1  # buckets that are unsharded before they are needed


class ParamUnsharder:
    """Keeps those buckets unsharded that forward or backward reads now, and the next one."""

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], comm: BucketComm, *, late_updates: bool = False
    ) -> None:
        """`buckets`: `Bucket.shard_params` has been called on each. late_updates: updates may end after the step."""
        self._buckets, self._comm, self._defers = buckets, comm, late_updates
        self._position = {bucket.index: position for position, bucket in enumerate(buckets)}
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._unsharding: dict[int, _Unshard] = {}  # of every bucket that is unsharded or being unsharded, by index
        self._of_storage: dict[int, Bucket] = {}  # the same buckets by the storage of their memory
        self._scopes: list[dict[int, Bucket]] = []  # the buckets that each running module has read, innermost last
        self._in_backward: dict[int, Bucket] = {}
        # Index of a bucket -> number of its parameters whose values backward still needs.
        self._pending = dict.fromkeys(self._position, 0)
        # After begin_backward, and until the model's next forward, a module that runs is recomputed.
        self._model, self._backward = model, False
        self._last_offloaded = next(
            (bucket for bucket in buckets if bucket.offloaded is not None), None
        )  # in update order
        self._first = buckets[-1] if len({bucket.stage for bucket in buckets}) == 1 else None
        self._forwards_left = 0  # in this step
        self._read: set[int] = set()  # buckets that this forward has read, by index
        self._released: Bucket | None = None
        self._deferred: dict[int, Callable[[], None]] = {}  # waits for updates, by index of the bucket
        register_read_hook(model, self._before_read)
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """Returns the parameter of which a tensor is a view, if it is in one of these buckets and unsharded now."""
        bucket = self._of_storage.get(tensor.untyped_storage()._cdata)
        return None if bucket is None else bucket.parameter_at(int(tensor.storage_offset()))

    def mark_updated(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """Call when the bucket's `param_shard` is updated, or will be when `finish` returns.

        Prefetches the buckets that forward reads first; offloaded ones only after the update of all offloaded buckets,
        because updates need device memory.
        """
        self._free(bucket)
        if finish is not None:
            self._deferred[bucket.index] = finish
        first = self._buckets[-1 - _PREFETCHED :]
        if bucket in first and bucket.offloaded is None:
            self._start(bucket)
        if bucket is self._last_offloaded:
            for other in reversed(first):
                if other.offloaded is not None:
                    self._start(other)

    def end_step(self) -> None:
        """Call when all buckets are marked as updated."""
        if not self._defers:
            for bucket in reversed(self._buckets):
                self.finish_update(bucket)

    def begin_step(self, microbatches: int) -> None:
        """Call before a step. `microbatches`: forwards of each stage until the next update."""
        self._forwards_left = microbatches

    def begin_backward(self) -> None:
        """Call before a backward, or before the half of a split one that reads parameters."""
        self._backward = True
        self._pending = {bucket.index: len(bucket.parameters) for bucket in self._buckets}

    def mark_done(self, bucket: Bucket) -> None:
        """Call when backward no longer needs the values of one more of the bucket's parameters."""
        self._pending[bucket.index] -= 1
        if self._pending[bucket.index] == 0:
            self._in_backward.pop(bucket.index, None)
            if self._stays_for_next_forward(bucket):
                self._release(bucket)
            else:
                self._free(bucket)

    def end_backward(self) -> None:
        """Frees all buckets, also those whose gradients were never computed."""
        self._in_backward.clear()
        for bucket in self._buckets:
            if not self._stays_for_next_forward(bucket):
                self._free(bucket)

    def synchronize(self) -> None:
        """Waits for everything in flight and frees all unsharded buckets.

        Then the host may read and write offloaded shards.
        """
        for bucket in self._buckets:
            self._free(bucket)
            self.finish_update(bucket)
            if bucket.offloaded is not None:
                bucket.offloaded.synchronize()

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """All buckets are unsharded in the body, in which the model does not run. Call it when nothing is in flight."""
        for bucket in reversed(self._buckets):
            self._start(bucket)
        for bucket in reversed(self._buckets):
            self._unsharding[bucket.index].wait()
        try:
            yield
        finally:
            for bucket in self._buckets:
                self._free(bucket)

    def finish_update(self, bucket: Bucket) -> None:
        """Waits for this bucket's deferred update."""
        if bucket.index in self._deferred:
            self._deferred.pop(bucket.index)()

    def _before_read(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if self._scopes:
            self._scopes[-1][bucket.index] = bucket
        if not self._backward:
            self._read.add(bucket.index)
            if self._released not in (None, bucket):
                self._free_released()
        self._unshard(bucket, direction=1 if self._backward else -1)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model:
            self._backward, self._forwards_left = False, self._forwards_left - 1
            self._read.clear()
        self._scopes.append({})

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        read = self._scopes.pop()
        if self._backward:
            self._before_backward(read.values())
        for index, bucket in read.items():
            if not any(index in scope for scope in self._scopes) and index not in self._in_backward:
                self._release(bucket)
        if read and torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self._before_backward(read.values()))

    def _before_backward(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if self._pending[bucket.index] > 0:  # else it was freed for good
                self._in_backward[bucket.index] = bucket
                self._unshard(bucket, direction=1)

    def _unshard(self, bucket: Bucket, *, direction: int) -> None:
        """Waits until the bucket is unsharded, and prefetches the next ones in `direction`."""
        if bucket.index not in self._unsharding:
            self._start(bucket)
        self._unsharding[bucket.index].wait()
        for distance in range(1, _PREFETCHED + 1):
            position = self._position[bucket.index] + direction * distance
            if not 0 <= position < len(self._buckets):
                continue
            following = self._buckets[position]
            if following.index in self._unsharding or following.stage != bucket.stage:
                continue
            if self._pending[following.index] > 0 if self._backward else following.index not in self._read:
                self._start(following)

    def _start(self, bucket: Bucket) -> None:
        self.finish_update(bucket)
        copy = bucket.unshard()
        self._of_storage[bucket.whole.untyped_storage()._cdata] = bucket
        gather = self._comm.gather(bucket.view, bucket.whole, bucket.label, copy)
        self._unsharding[bucket.index] = _Unshard(copy, gather)

    def _release(self, bucket: Bucket) -> None:
        if self._released is not bucket:
            self._free_released()
        self._released = bucket

    def _free_released(self) -> None:
        released, self._released = self._released, None
        if released is not None and not self._is_held(released):
            self._free(released)

    def _stays_for_next_forward(self, bucket: Bucket) -> bool:
        """Returns whether the next microbatch's forward begins with this bucket."""
        return bucket is self._first and self._forwards_left > 0

    def _is_held(self, bucket: Bucket) -> bool:
        return bucket.index in self._in_backward or any(bucket.index in scope for scope in self._scopes)

    def _free(self, bucket: Bucket) -> None:
        unsharding = self._unsharding.pop(bucket.index, None)
        if unsharding is not None:
            unsharding.wait()
            del self._of_storage[bucket.whole.untyped_storage()._cdata]
            bucket.reshard()
        if self._released is bucket:
            self._released = None


class _Unshard:
    """An unshard in flight: a copy of this rank's shard from the host, followed by a gather of all shards."""

    def __init__(self, copy: Work | None, gather: Handle) -> None:
        self._copy, self._gather = copy, gather
        self._is_done = False

    def wait(self) -> None:
        """Orders later work of the caller behind the unshard."""
        if self._is_done:
            return
        if self._copy is not None:
            self._copy.wait()
        self._gather.wait()
        self._is_done = True


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, (tuple, list)) else []
