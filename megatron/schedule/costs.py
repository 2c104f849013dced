"""The seconds that the actions of a schedule take, for K cases at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.schedule.events import COSTS

_Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds as arrays [stages, K]; those of boundaries between stages are [stages - 1, K].

    forward, input_grad, weight_grad: a microbatch in a stage. backward: gradients of input and weights in one action.
    transfer: the time for which a send occupies the link from one rank to another; latency: the time from then until
    the data arrives. Boundary number b is that between stages b and b + 1, in both directions. offload, reload: one
    copy of the offloaded activations of a microbatch. bucket: the reduction of one of the equal buckets of a stage's
    gradients. forward_exchange, backward_exchange: all exchanges of tokens of a microbatch in a stage, in addition to
    the computations.
    """

    forward: _Array
    input_grad: _Array
    weight_grad: _Array
    backward: _Array
    transfer: _Array
    latency: _Array
    offload: _Array
    reload: _Array
    bucket: _Array
    forward_exchange: _Array
    backward_exchange: _Array

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        backward: float | None = None,
        latency: float = 0.0,
        transfer: float = 0.0,
        offload: float = 0.0,
        reload: float = 0.0,
        bucket: float = 0.0,
        forward_exchange: float = 0.0,
        backward_exchange: float = 0.0,
    ) -> Costs:
        """Returns one case with equal costs for every stage and boundary. `backward` is by default the sum of its
        halves."""

        def column(seconds: float, rows: int = num_stages) -> _Array:
            return np.full((rows, 1), seconds)

        return cls(
            forward=column(forward),
            input_grad=column(input_grad),
            weight_grad=column(weight_grad),
            backward=column(input_grad + weight_grad if backward is None else backward),
            transfer=column(transfer, num_stages - 1),
            latency=column(latency, num_stages - 1),
            offload=column(offload),
            reload=column(reload),
            bucket=column(bucket),
            forward_exchange=column(forward_exchange),
            backward_exchange=column(backward_exchange),
        )

    @classmethod
    def joined(cls, parts: Sequence[Costs]) -> Costs:
        """Returns the cases of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls(**{name: np.concatenate([getattr(costs, name) for costs in parts], axis=1) for name in COSTS[1:]})

    def take(self, columns: NDArray[np.int64]) -> Costs:
        """Returns the cases with these numbers."""
        return Costs(**{name: getattr(self, name)[:, columns] for name in COSTS[1:]})

    def rows(self) -> _Array:
        """Returns all costs as one array, in the order of `COSTS`, after one row of zeros."""
        return np.concatenate([np.zeros_like(self.forward[:1]), *(getattr(self, name) for name in COSTS[1:])])


def column(seconds: ArrayLike) -> _Array:
    """Returns [n, 1], the costs of one case, from n numbers."""
    return np.asarray(seconds, dtype=np.float64)[:, None]
