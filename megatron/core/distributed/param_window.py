"""Parameters that come and go: whole ahead of use, freed after it, in forward and again in backward.

Ranks share them and gather them (ZeRO-3: Rajbhandari et al., arXiv 1910.02054; ahead of use as Zhao et al., FSDP, arXiv
2304.11277), or they live away from the device (a bucket's `home`) and are copied in, or both: each rank copies its slice.

[Note: what is whole when]
Forward. A bucket is brought where one of its parameters is first read, and held until the innermost module that read it
is left (only modules that own parameters, and the model itself, count). The bucket that forward needs next travels
meanwhile, if it is of the same pipeline stage. The one released last stays until another is read: the next module may lie
in the same bucket.
Backward. Before a module's backward the buckets it read are brought again, and the next one of backward travels. A
bucket is freed when backward has been through with all its parameters, whether their gradients were computed or put off:
nothing can need its values then. Only the one that forward reads first stays for the next microbatch, where the rank has
one stage: nothing of that forward could hide its way. What a recomputation reads in backward is held as if backward had
come to it: it does next.
What is freed has not changed, so nothing is written back; an update writes to the slice itself.
Freed parameters are empty, so reading one around the table fails loudly. Memory comes from torch's allocator, not from a
pool: a view that autograd saved keeps what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.home import Home, Travel
from megatron.core.distributed.param_table import watch_reads
from megatron.core.parameter import Parameter

_AHEAD = 1  # buckets that travel before they are needed


class ParamWindow:
    """Keeps the buckets whole that forward and backward need now, and the next one."""

    def __init__(
        self,
        model: nn.Module,
        buckets: list[Bucket],
        comm: BucketComm,
        *,
        homes: Mapping[int, Home],
        late_updates: bool = False,
    ) -> None:
        """homes: of the buckets that live away from the device, by index. late_updates: updates may end after the step."""
        self._buckets, self._comm, self._waits_late = buckets, comm, late_updates
        self._place = {bucket.index: place for place, bucket in enumerate(buckets)}
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._arrivals: dict[int, _Arrival] = {}  # of every bucket that is whole or on its way, by index
        self._whole_at: dict[int, Bucket] = {}  # the same buckets by the address of their memory
        self._scopes: list[dict[int, Bucket]] = []  # what each module that is running has read, innermost last
        self._in_backward: dict[int, Bucket] = {}
        # How many of a bucket's parameters backward has not been through with, by its index.
        self._unread = dict.fromkeys(self._place, 0)
        self._model, self._backwards = model, False  # a module that runs before the next forward is recomputed
        self._last_at_home = next((bucket for bucket in buckets if bucket.index in homes), None)  # to be updated
        self._first = buckets[-1] if len({bucket.stage for bucket in buckets}) == 1 else None
        self._forwards = 0  # that are still to come in this step
        self._read: set[int] = set()  # buckets that this forward has come to, by index
        self._released: Bucket | None = None
        self._late: dict[int, Callable[[], None]] = {}  # updates that have not been waited for, by index of the bucket
        for bucket in buckets:
            bucket.shard_params(homes.get(bucket.index))
        watch_reads(model, self._before_read)
        for module in model.modules():
            if module is model or module._parameters:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """The parameter that a tensor is a part of, if it is one of these, and whole now."""
        bucket = self._whole_at.get(tensor.untyped_storage().data_ptr())
        return None if bucket is None else bucket.parameter_at(int(tensor.storage_offset()))

    def publish(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """The bucket's `param_shard` has been updated, or is when `finish` returns. The first ones that forward reads
        start to travel; those with a home when all with a home have been updated, which need memory for that."""
        self._free(bucket)
        if finish is not None:
            self._late[bucket.index] = finish
        first = self._buckets[-1 - _AHEAD :]
        if bucket in first and bucket.home is None:
            self._start(bucket)
        if bucket is self._last_at_home:
            for other in reversed(first):
                if other.home is not None:
                    self._start(other)

    def end_step(self) -> None:
        """All buckets have been updated, but for late ones."""
        if not self._waits_late:
            for bucket in reversed(self._buckets):
                self.settle_update(bucket)

    def begin_step(self, microbatches: int) -> None:
        """So many forwards of each stage follow until the next update."""
        self._forwards = microbatches

    def begin_backward(self) -> None:
        """Backward begins, and what it recomputes; or the half of it that needs parameters."""
        self._backwards = True
        self._unread = {bucket.index: len(bucket.parameters) for bucket in self._buckets}

    def been_through(self, bucket: Bucket) -> None:
        """Backward needs the values of one more of the bucket's parameters no more."""
        self._unread[bucket.index] -= 1
        if self._unread[bucket.index] == 0:
            self._in_backward.pop(bucket.index, None)
            if self._is_next(bucket):
                self._release(bucket)
            else:
                self._free(bucket)

    def end_backward(self) -> None:
        """Free what backward gathered, also where gradients never came."""
        self._in_backward.clear()
        for bucket in self._buckets:
            if not self._is_next(bucket):
                self._free(bucket)

    def settle(self) -> None:
        """Wait for all that is in flight and give up all whole buckets: the shards are what counts. The host may read and
        write those of homes."""
        for bucket in self._buckets:
            self._free(bucket)
            self.settle_update(bucket)
            if bucket.home is not None:
                bucket.home.settle()

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
        if not self._backwards:
            self._read.add(bucket.index)
            if self._released not in (None, bucket):
                self._give_up_released()
        self._need(bucket, ahead=1 if self._backwards else -1)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model:
            self._backwards, self._forwards = False, self._forwards - 1
            self._read.clear()
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
            if self._unread[bucket.index] > 0:  # else it was freed for good
                self._in_backward[bucket.index] = bucket
                self._need(bucket, ahead=1)

    def _need(self, bucket: Bucket, *, ahead: int) -> None:
        """Return when the bucket is whole; send the next ones in direction `ahead` on their way."""
        if bucket.index not in self._arrivals:
            self._start(bucket)
        self._arrivals[bucket.index].wait()
        for step in range(1, _AHEAD + 1):
            place = self._place[bucket.index] + ahead * step
            if not 0 <= place < len(self._buckets):
                continue
            following = self._buckets[place]
            if following.index in self._arrivals or following.stage != bucket.stage:
                continue
            if self._unread[following.index] > 0 if self._backwards else following.index not in self._read:
                self._start(following)

    def _start(self, bucket: Bucket) -> None:
        self.settle_update(bucket)
        copy = bucket.make_whole()
        self._whole_at[bucket.whole.data_ptr()] = bucket
        gather = self._comm.gather(bucket.whole, bucket.label, None if copy is None else copy.done)
        self._arrivals[bucket.index] = _Arrival(copy, gather)

    def _release(self, bucket: Bucket) -> None:
        if self._released is not bucket:
            self._give_up_released()
        self._released = bucket

    def _give_up_released(self) -> None:
        released, self._released = self._released, None
        if released is not None and not self._held(released):
            self._free(released)

    def _is_next(self, bucket: Bucket) -> bool:
        """Whether the next microbatch's forward begins with it."""
        return bucket is self._first and self._forwards > 0

    def _held(self, bucket: Bucket) -> bool:
        return bucket.index in self._in_backward or any(bucket.index in scope for scope in self._scopes)

    def _free(self, bucket: Bucket) -> None:
        arrival = self._arrivals.pop(bucket.index, None)
        if arrival is not None:
            arrival.wait()
            del self._whole_at[bucket.whole.data_ptr()]
            bucket.drop_whole()
        if self._released is bucket:
            self._released = None


class _Arrival:
    """A bucket on its way: this rank's slice from its home, then everybody's."""

    def __init__(self, copy: Travel | None, gather: Handle) -> None:
        self._copy, self._gather = copy, gather
        self._is_here = False

    def wait(self) -> None:
        """Compute may read it."""
        if self._is_here:
            return
        if self._copy is not None:
            self._copy.wait()
        self._gather.wait()
        self._is_here = True


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, (tuple, list)) else []
