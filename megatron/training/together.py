"""Work that may fail on one rank fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.base.errors import UserError
from megatron.command_line.exits import as_user_error
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Group

T = TypeVar("T")


def together(group: Group, work: Callable[[], T]) -> T:
    """The result of `work`, run on every rank. A user's mistake that one rank finds is raised on all,
    so that none waits.

    Communication: gathers one message per rank over `group`. Raises UserError; other exceptions only on their own rank.
    """
    result: T | None = None
    error: UserError | None = None
    try:
        result = work()
    except Exception as caught:
        error = as_user_error(caught)
        if error is None:
            raise
        error.on_all_ranks = True
    failures = gather_objects(str(error) if error else None, group)
    for rank, message in enumerate(failures):
        if message is not None:
            raise error or UserError(f"on rank {group.ranks[rank]}: {message}")
    return result  # type: ignore[return-value]
