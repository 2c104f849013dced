"""Steps that all ranks of a group take together: if one fails, all raise the same CheckpointError and none hangs."""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from megatron.base.errors import CheckpointError, CommError, first_line
from megatron.base.heartbeat import Call
from megatron.core.dist_checkpointing.tensor_file import DamagedError
from megatron.core.groups import Group

T = TypeVar("T")
PATIENCE = 6  # an hour where a collective may take ten minutes
_NAMED_RANKS = 3  # the number of failures that one message names


def on_first(group: Group, step: str, run: Callable[[], T]) -> T:
    """Runs on the group's first rank and returns the (small) result on all ranks.
    Communication: one object broadcast."""
    box: list[T | CheckpointError | None] = [_attempt(run) if group.rank == 0 else None]
    if group.process_group is not None:
        with _watched(group, step):
            dist.broadcast_object_list(box, src=group.ranks[0], group=group.process_group)
    result = box[0]
    if isinstance(result, CheckpointError):
        raise _joined(group, {0: result})
    return result  # type: ignore[return-value]


def on_all(group: Group, step: str, run: Callable[[], T]) -> T:
    """Runs on every rank and returns this rank's result. Communication: one object all-gather of the failures."""
    result = _attempt(run)
    failures: list[CheckpointError | None] = [result if isinstance(result, CheckpointError) else None]
    if group.process_group is not None:
        mine, failures = failures[0], [None] * group.size
        with _watched(group, step):
            dist.all_gather_object(failures, mine, group=group.process_group)
    if failed := {rank: error for rank, error in enumerate(failures) if error is not None}:
        raise _joined(group, failed)
    assert not isinstance(result, CheckpointError)
    return result


def reduce_on_first(group: Group, step: str, run: Callable[[], T], reduce: Callable[[list[T]], None]) -> None:
    """Runs on every rank, and then `reduce` on the first one with the (small) results of all ranks in their order.

    Communication: a gather of objects, and a broadcast of the failures.
    """
    with _watched(group, step):
        mine = _attempt(run)
        results: list[T | CheckpointError] | None = [mine]
        if group.process_group is not None:
            results = [mine] * group.size if group.rank == 0 else None
            dist.gather_object(mine, results, dst=group.ranks[0], group=group.process_group)
        failures: dict[int, CheckpointError] = {}
        if results is not None:
            failures = {rank: error for rank, error in enumerate(results) if isinstance(error, CheckpointError)}
            complete = [result for result in results if not isinstance(result, CheckpointError)]
            if not failures and isinstance(error := _attempt(lambda: reduce(complete)), CheckpointError):
                failures = {0: error}
        box = [failures]
        if group.process_group is not None:
            dist.broadcast_object_list(box, src=group.ranks[0], group=group.process_group)
    if box[0]:
        raise _joined(group, box[0])


def through_dcp(group: Group, step: str, run: Callable[[], None]) -> None:
    """Runs a torch.distributed.checkpoint operation, which coordinates ranks itself, and converts its failure.

    Its planner and storage must raise errors that can be pickled, as `portable` makes them, because it sends them
    between ranks.
    """
    failures: dict[int, CheckpointError] = {}
    with _watched(group, step), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a world of one rank is intended
        try:
            run()
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if not isinstance(cause, Exception):
                    # KeyboardInterrupt and similar exceptions are not failures of the checkpoint
                    raise cause from error
            failures = {rank: _as_checkpoint_error(cause) for rank, (cause, _) in error.failures.items()}
    if failures:
        raise _joined(group, failures)


@contextlib.contextmanager
def patient(group: Group) -> Iterator[None]:
    """Lets the ranks wait for each other PATIENCE times as long as in training: files of a checkpoint may take longer
    than any collective, and a rank that has ended is noticed at once.
    """
    if group.process_group is None:
        yield
        return
    seconds = group.heartbeat.timeout
    set_timeout(timedelta(seconds=PATIENCE * seconds), group.process_group)
    try:
        yield
    finally:
        set_timeout(timedelta(seconds=seconds), group.process_group)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Converts any exception of the body to a CheckpointError that names the cause and that every rank can unpickle."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise _as_checkpoint_error(error) from error


def _attempt(run: Callable[[], T]) -> T | CheckpointError:
    try:
        return run()
    except Exception as error:
        return _as_checkpoint_error(error)


def _as_checkpoint_error(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        where = f" ({error.filename})" if error.filename else ""
        return CheckpointError(f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}{where}")
    return CheckpointError(f"{type(error).__name__}: {error}")


def _joined(group: Group, failures: Mapping[int, CheckpointError]) -> CheckpointError:
    """Combines the failures of several ranks (numbered in the group) into one error. With one rank it names no rank."""
    named = list(failures.items())[:_NAMED_RANKS]
    parts = [f"rank {group.ranks[rank]}: {error}" if group.size > 1 else str(error) for rank, error in named]
    if len(failures) > _NAMED_RANKS:
        parts.append(f"and {len(failures) - _NAMED_RANKS} more ranks")
    damaged = any(isinstance(error, DamagedError) for error in failures.values())
    return (DamagedError if damaged else CheckpointError)(" ".join("; ".join(parts).splitlines()))


@contextlib.contextmanager
def _watched(group: Group, step: str) -> Iterator[None]:
    """Tells the heartbeat where this rank is; a failed collective becomes a CommError that names the missing ranks."""
    if group.process_group is None:
        yield
        return
    started = time.monotonic()
    group.heartbeat.enter(step, group.name, Call(step, group.name, (), "object", 0))
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise this for a timeout or a lost peer
        cause = first_line(error)
        seconds = time.monotonic() - started
        raise CommError(group.heartbeat.explain(step, group.name, group.ranks, seconds, cause)) from error
    group.heartbeat.leave()
