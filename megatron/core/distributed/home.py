"""Where a bucket's weights wait while nobody reads them, when that is not the device. See memory/far_weights.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Travel(Protocol):
    """Copies under way. `done`: what comm/bucket_comm.py waits for, a lane's job or a CUDA event."""

    done: Any

    def wait(self) -> None:
        """What compute does from now on comes after the copies."""
        ...


class Home(Protocol):
    """Of one rank's slice of a bucket. Copies from and to it happen in the order in which they are asked for.

    shard [size / shards]: the weights, in host memory. The host may use it after `settle`.
    """

    @property
    def shard(self) -> Tensor:
        """See the class."""
        ...

    def bring(self, near: Tensor) -> Travel:
        """Start to copy all of it to near memory [size / shards]."""
        ...

    def store(self, parts: Sequence[tuple[int, Tensor]]) -> Travel:
        """Start to copy (first element, new values) back."""
        ...

    def settle(self) -> None:
        """Return when no copy is under way."""
        ...


class Homes(Protocol):
    """Which parameters have a home away from the device."""

    def takes(self, name: str) -> bool:
        """Whether this parameter does. All ranks must say the same."""
        ...

    def home(self, label: str, near: Tensor) -> Home:
        """A new home, with these values in it. `label`: of the bucket, for timelines."""
        ...
