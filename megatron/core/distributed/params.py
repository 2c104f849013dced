"""How the parameters of each bucket are kept: whole on the device all the time, or only while they are read."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.home import Homes
from megatron.core.distributed.param_gate import ParamGate
from megatron.core.distributed.param_window import ParamWindow
from megatron.core.parameter import Parameter


class Params:
    """Hands each bucket to a gate or to a window. come_and_go: names of the parameters that a window has.

    With both, their gathers are in one order on all ranks all the same: the order in which the model reads.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: list[Bucket],
        comm: BucketComm,
        *,
        sharded: bool,
        homes: Homes | None,
        overlap: bool,
        late_updates: bool,
    ) -> None:
        """sharded: ranks share all parameters. The rest as ParamGate and ParamWindow have it."""
        away = {
            bucket.index: homes.home(bucket.label, bucket.param_shard)
            for bucket in buckets
            if homes is not None and homes.takes(next(iter(bucket.parameters)))
        }
        visiting = [bucket for bucket in buckets if sharded or bucket.index in away]
        staying = [bucket for bucket in buckets if not sharded and bucket.index not in away]
        self._keepers: list[ParamGate | ParamWindow] = []
        self._keeper_of: dict[int, ParamGate | ParamWindow] = {}
        self.come_and_go = frozenset(name for bucket in visiting for name in bucket.parameters)
        if visiting:
            self._keep(ParamWindow(model, visiting, comm, homes=away, late_updates=late_updates), visiting)
        if staying:
            self._keep(ParamGate(model, staying, comm, overlap=overlap, late_updates=late_updates), staying)

    def _keep(self, keeper: ParamGate | ParamWindow, buckets: list[Bucket]) -> None:
        self._keepers.append(keeper)
        self._keeper_of.update(dict.fromkeys((bucket.index for bucket in buckets), keeper))

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """The parameter that a tensor is a part of, if that comes and goes."""
        found = (keeper.parameter_of(tensor) for keeper in self._keepers)
        return next((parameter for parameter in found if parameter is not None), None)

    def publish(self, bucket: Bucket, finish: Callable[[], None] | None) -> None:
        """The bucket's `param_shard` has been updated, or is when `finish` returns."""
        self._keeper_of[bucket.index].publish(bucket, finish)

    def end_step(self) -> None:
        """All buckets have been updated, but for late ones."""
        for keeper in self._keepers:
            keeper.end_step()

    def begin_step(self, microbatches: int) -> None:
        """So many forwards of each stage follow until the next update."""
        for keeper in self._keepers:
            keeper.begin_step(microbatches)

    def begin_backward(self) -> None:
        """Backward, or the half of it that needs parameters, begins."""
        for keeper in self._keepers:
            keeper.begin_backward()

    def been_through(self, bucket: Bucket) -> None:
        """Backward needs one of the bucket's parameters no more."""
        self._keeper_of[bucket.index].been_through(bucket)

    def end_backward(self) -> None:
        """Give up what was there for it."""
        for keeper in self._keepers:
            keeper.end_backward()

    def settle(self) -> None:
        """Wait for all that is in flight."""
        for keeper in self._keepers:
            keeper.settle()

    def settle_update(self, bucket: Bucket) -> None:
        """Wait for this bucket's late update."""
        self._keeper_of[bucket.index].settle_update(bucket)
