"""A save that goes on while the run trains (--async-save, --non-persistent-save-interval), and its price."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron.core.comm.collectives import gather_objects
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.groups import Group
from megatron.core.streams.streams import Streams


class SavePrice(NamedTuple):
    """What a background save took, on the rank that needed most of each.

    nbytes: of the copies in host memory. exposed_seconds: for which training waited. written_seconds: for which the
    thread wrote and published. sent_bytes, replication_seconds: of files of a local checkpoint to ranks that keep
    replicas.
    """

    nbytes: int
    exposed_seconds: float
    written_seconds: float
    sent_bytes: int
    replication_seconds: float


class BackgroundSave:
    """At most one pending save of a run. staging: its host memory and its thread. pending: the save, None without one.

    All methods are collective over the world, and raise CheckpointError on all ranks; the save is then dropped.
    """

    def __init__(self, streams: Streams) -> None:
        self.staging = Staging(streams)
        self.pending: PendingSave | None = None
        self._exposed_seconds = 0.0  # for which training has waited for the pending save

    @property
    def remaining(self) -> int | None:
        """See PendingSave; None without a pending save. No communication."""
        return None if self.pending is None else self.pending.remaining

    def begin(self, start: Callable[[Staging], PendingSave]) -> None:
        """Begins a save, by a function that is given the staging. There must be no pending one."""
        assert self.pending is None
        self._exposed_seconds = 0.0
        with self._timed():
            self.pending = start(self.staging)

    def advance(self, remaining: int) -> bool:
        """Goes on as far as no rank has to wait; returns whether `finish` would not wait either.

        remaining: the largest of all ranks.
        """
        assert self.pending is not None
        if remaining <= 1:
            with self._timed():
                self.pending.gather()
        return remaining == 0

    def finish(self, end: Callable[[PendingSave], Path]) -> Path:
        """Waits for the end of the pending save, by a function that is given it. Returns the checkpoint's folder."""
        assert self.pending is not None
        with self._timed():
            path = end(self.pending)
        return path

    def close(self, world: Group) -> SavePrice:
        """Drops the save that has ended and returns its price.

        Communication: a gather of five numbers over the world.
        """
        save, exposed = self.pending, self._exposed_seconds + self.staging.exposed_seconds
        assert save is not None
        price = SavePrice(self.staging.nbytes, exposed, save.seconds, save.sent_bytes, save.replication_seconds)
        prices = gather_objects(tuple(price), world)
        self.pending = None
        return SavePrice(*(max(column) for column in zip(*prices, strict=True)))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            self.pending = None
            raise
        self._exposed_seconds += time.perf_counter() - started
