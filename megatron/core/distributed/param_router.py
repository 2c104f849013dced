"""Routes each bucket to its owner: ParamGatherer (resident parameters) or ParamUnsharder (sharded or offloaded
ones)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.param_gatherer import ParamGatherer
from megatron.core.distributed.param_unsharder import ParamUnsharder
from megatron.core.offload.weights import WeightOffload
from megatron.core.parameter import Parameter


class ParamRouter:
    """Presents both owners as one. All ranks gather in the same order, that of the model's reads.

    sharded_names: names of the parameters that are empty while they are not in use.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: list[Bucket],
        comm: BucketComm,
        *,
        sharded: bool,
        offload: WeightOffload | None,
        overlap: bool,
        late_updates: bool,
    ) -> None:
        """sharded: the parameters that several ranks share are sharded. Other arguments as for the two owners."""
        not_resident, resident = list[Bucket](), list[Bucket]()
        for bucket in buckets:
            offloads = offload is not None and offload.includes(next(iter(bucket.parameters)))
            if offloads or (sharded and bucket.shards > 1):
                bucket.shard_params(offload if offloads else None)
                not_resident.append(bucket)
            else:
                resident.append(bucket)
        self._owners: list[ParamGatherer | ParamUnsharder] = []
        self._owner_of: dict[int, ParamGatherer | ParamUnsharder] = {}
        self.sharded_names = frozenset(name for bucket in not_resident for name in bucket.parameters)
        if not_resident:
            self._add(ParamUnsharder(model, not_resident, comm, late_updates=late_updates), not_resident)
        self._gatherer: ParamGatherer | None = None
        if resident:
            self._gatherer = ParamGatherer(model, resident, comm, overlap=overlap, late_updates=late_updates)
            self._add(self._gatherer, resident)

    def _add(self, owner: ParamGatherer | ParamUnsharder, buckets: list[Bucket]) -> None:
        self._owners.append(owner)
        self._owner_of.update(dict.fromkeys((bucket.index for bucket in buckets), owner))

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """Returns the sharded or offloaded parameter of which a tensor is a view, or None."""
        parameters = (owner.parameter_of(tensor) for owner in self._owners)
        return next((parameter for parameter in parameters if parameter is not None), None)

    def before_read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Call before resident parameters are read in another way than by attribute of their modules."""
        if self._gatherer is not None:
            for parameter in parameters:
                self._gatherer.before_read(parameter)

    def mark_updated(self, bucket: Bucket, finish: Callable[[], None] | None) -> None:
        """Call when the bucket's `param_shard` is updated, or will be when `finish` returns."""
        self._owner_of[bucket.index].mark_updated(bucket, finish)

    def end_step(self) -> None:
        """Call when all buckets are marked as updated."""
        for owner in self._owners:
            owner.end_step()

    def begin_step(self, microbatches: int) -> None:
        """Call before a step. `microbatches`: forwards of each stage until the next update."""
        for owner in self._owners:
            owner.begin_step(microbatches)

    def begin_backward(self) -> None:
        """Call before a backward, or before the half of a split one that reads parameters."""
        for owner in self._owners:
            owner.begin_backward()

    def mark_done(self, bucket: Bucket) -> None:
        """Call when backward no longer needs the values of one more of the bucket's parameters."""
        self._owner_of[bucket.index].mark_done(bucket)

    def end_backward(self) -> None:
        """Frees the buckets that backward has unsharded."""
        for owner in self._owners:
            owner.end_backward()

    def synchronize(self) -> None:
        """Waits for everything in flight."""
        for owner in self._owners:
            owner.synchronize()

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """See DataParallel."""
        self.synchronize()
        with contextlib.ExitStack() as stack:
            for owner in self._owners:
                if isinstance(owner, ParamUnsharder):
                    stack.enter_context(owner.full_parameters())
            yield

    def finish_update(self, bucket: Bucket) -> None:
        """Waits for this bucket's deferred update."""
        self._owner_of[bucket.index].finish_update(bucket)
