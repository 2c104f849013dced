"""Parameters that ranks share: gathered ahead of use, freed after it, in forward and again in backward (ZeRO-3).

Rajbhandari et al., arXiv 1910.02054; the gather ahead of use is that of Zhao et al. (FSDP), arXiv 2304.11277.

[Note: what is gathered when]
Forward. A bucket is gathered where one of its parameters is first read, and held until the innermost module that read it
is left (only modules that own parameters, and the model itself, count). The bucket that forward needs next travels
meanwhile. The one released last stays: the next module may lie in the same bucket.
Backward. Before a module's backward the buckets it read are gathered again, and the next one of backward travels. A
bucket is freed when all its gradients are complete: nothing can need its values then. What a recomputation reads in
backward is held as if backward had come to it: it does next.
Freed parameters are empty, so reading one around the table fails loudly. Memory comes from torch's allocator, not from a
pool: a view that autograd saved keeps what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.param_table import watch_reads

_AHEAD = 1  # buckets that travel before they are needed


class ParamWindow:
    """Keeps the buckets whole that forward and backward need now, and the next one."""

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], comm: BucketComm, *, late_updates: bool = False
    ) -> None:
        """late_updates: updates may end after the step."""
        self._buckets, self._comm, self._waits_late = buckets, comm, late_updates
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._gathers: dict[int, Handle] = {}  # of every bucket that is whole or on its way, by index
        self._scopes: list[dict[int, Bucket]] = []  # what each module that is running has read, innermost last
        self._in_backward: dict[int, Bucket] = {}
        self._model, self._backwards = model, False  # a module that runs before the next forward is recomputed
        self._released: Bucket | None = None
        self._late: dict[int, Callable[[], None]] = {}  # updates that have not been waited for, by index of the bucket
        for bucket in buckets:
            bucket.shard_params()
        watch_reads(model, self._before_read)
        for module in model.modules():
            if module is model or module._parameters:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)

    def publish(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """The bucket's `param_shard` has been updated, or is when `finish` returns; the first ones that forward reads
        start to travel."""
        self._free(bucket)
        if finish is not None:
            self._late[bucket.index] = finish
        if bucket.index >= len(self._buckets) - 1 - _AHEAD:
            self._start(bucket)

    def end_step(self) -> None:
        """All buckets have been updated, but for late ones."""
        if not self._waits_late:
            for bucket in reversed(self._buckets):
                self.settle_update(bucket)

    def begin_backward(self) -> None:
        """Backward begins, and what it recomputes."""
        self._backwards = True

    def gradients_complete(self, bucket: Bucket) -> None:
        """Backward needs the bucket's parameters no more."""
        self._in_backward.pop(bucket.index, None)
        self._free(bucket)

    def end_backward(self) -> None:
        """Free what backward gathered, also where gradients never came."""
        self._in_backward.clear()
        for bucket in self._buckets:
            self._free(bucket)

    def settle(self) -> None:
        """Wait for all updates and gathers in flight and give up all whole buckets: the shards are what counts."""
        for bucket in self._buckets:
            self._free(bucket)
            self.settle_update(bucket)

    def settle_update(self, bucket: Bucket) -> None:
        """Wait for this bucket's late update."""
        if bucket.index in self._late:
            self._late.pop(bucket.index)()

    def _before_read(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if self._scopes:
            self._scopes[-1][bucket.index] = bucket
        self._need(bucket, ahead=1 if self._backwards else -1)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model:
            self._backwards = False
        self._scopes.append({})

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        read = self._scopes.pop()
        if self._backwards:
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
            if bucket.missing > 0:  # else its gradients are complete, and it was freed for good
                self._in_backward[bucket.index] = bucket
                self._need(bucket, ahead=1)

    def _need(self, bucket: Bucket, *, ahead: int) -> None:
        """Return when the bucket is whole; send the next ones in direction `ahead` on their way."""
        if bucket.index not in self._gathers:
            self._start(bucket)
        handle = self._gathers[bucket.index]
        if handle.work is not None:
            handle.wait()
            self._gathers[bucket.index] = handle._replace(work=None)
            for step in range(1, _AHEAD + 1):
                following = bucket.index + ahead * step
                if not 0 <= following < len(self._buckets) or following in self._gathers:
                    continue
                if ahead < 0 or self._buckets[following].missing > 0:  # backward is not through with it yet
                    self._start(self._buckets[following])

    def _start(self, bucket: Bucket) -> None:
        self.settle_update(bucket)
        bucket.make_whole()
        self._gathers[bucket.index] = self._comm.gather(bucket.whole, bucket.label)

    def _release(self, bucket: Bucket) -> None:
        before, self._released = self._released, bucket
        if before is not None and before is not bucket and not self._held(before):
            self._free(before)

    def _held(self, bucket: Bucket) -> bool:
        return bucket.index in self._in_backward or any(bucket.index in scope for scope in self._scopes)

    def _free(self, bucket: Bucket) -> None:
        handle = self._gathers.pop(bucket.index, None)
        if handle is not None:
            handle.wait()
            bucket.drop_whole()
        if self._released is bucket:
            self._released = None


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, (tuple, list)) else []
