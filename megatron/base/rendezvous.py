"""Agreeing on one attempt of a job over a store that outlives attempts.

torchrun keeps its key-value store when it restarts the ranks (--max-restarts, or a host that joins or leaves). The keys of
the attempt before are still there, among them the addresses of processes that are dead, and nothing in the environment
numbers the attempts: TORCHELASTIC_RESTART_COUNT counts the restarts that one host began, and differs between hosts. So
the ranks that are alive find each other first, and put all that follows under a name of their own.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol

from megatron.base.errors import CommError

_LEADER = "attempt/leader"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5  # seconds between two looks at the store


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key, waiting until somebody has written it. Raises RuntimeError after the store's timeout."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """The name of this attempt: the same on all of its ranks, and never that of another attempt over the same store.

    Rank 0 announces a new name. Each other rank answers the name that it finds with a token of its own, and rank 0 welcomes
    each token it receives. A rank that found the name of an earlier attempt is welcomed by nobody and looks again. Every
    process that calls this must be alive; torchrun ends the ranks of one attempt on all hosts before it starts the next.
    Raises CommError when rank 0 does not come within the timeout, RuntimeError (the store's) when another rank does not.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        store.set(_LEADER, token)
        for other in range(1, world_size):
            answered = store.get(_answer(token, other)).decode()
            store.set(_welcome(answered), token)
        return token
    end, pause, leader = time.monotonic() + timeout_seconds, _SHORTEST_PAUSE, ""
    while not store.check([_welcome(token)]):
        if time.monotonic() > end:
            raise CommError(f"rank 0 did not answer within {timeout_seconds:g} s")
        newest = store.get(_LEADER).decode()
        if newest != leader:
            leader = newest
            store.set(_answer(leader, rank), token)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return store.get(_welcome(token)).decode()


def _answer(leader: str, rank: int) -> str:
    return f"attempt/{leader}/{rank}"


def _welcome(token: str) -> str:
    return f"attempt/welcome/{token}"
