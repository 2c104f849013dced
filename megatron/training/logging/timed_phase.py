"""Times rare parts of a run, such as a save, and prints the time as soon as they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.base.log import get_logger
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.training.logging.timers import format_timers

log = get_logger(__name__)


@contextmanager
def timed_phase(name: str, groups: Groups) -> Iterator[None]:
    """Sets the heartbeat's phase `name` during the body; then prints Megatron-LM's block of its time over ranks.

    Times are those of the host clocks. Communication: a gather of one number over the world, after the body unless it
    raises.
    """
    started = time.perf_counter()
    with groups.heartbeat.phase(name):
        yield
        ranks = gather_objects({name: time.perf_counter() - started}, groups.world)
    log.info(format_timers(ranks))
