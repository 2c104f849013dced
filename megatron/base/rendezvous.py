"""Lets the ranks of one attempt of a job agree on a name, over a store that outlives attempts.

torchrun keeps its key-value store when it restarts the ranks (--max-restarts, or a host that joins or leaves). The
store then still has the keys of the previous attempt, among them the addresses of dead processes, and no environment
variable numbers the attempts: TORCHELASTIC_RESTART_COUNT counts the restarts that one host began, and differs between
hosts. So the live ranks first agree on a new name, and all later keys are put under that name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.base.errors import CommError, first_line

_LEADER = "attempt/leader"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5  # seconds between two reads of the store
_END = "spares/end"
_ANSWER_SECONDS = 5.0  # that rank 0, which may hold the store, stays for the answers of spares


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def set(self, key: str, value: str) -> None:
        """Writes a key."""

    def get(self, key: str) -> bytes:
        """Reads a key, waiting until it has been written. Raises RuntimeError after the store's timeout."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all of these keys exist."""


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Returns the name of this attempt: equal on all of its ranks, and different from that of any other attempt.

    Rank 0 announces a new name. Each other rank answers a name that it finds with a token of its own, and rank 0
    confirms each token that it receives. A rank that found the name of an earlier attempt receives no confirmation and
    reads the name again. Every process that calls this function must be alive; torchrun ends the ranks of one attempt
    on all hosts before it starts the next. Raises CommError if rank 0 does not answer within the timeout, and
    RuntimeError (the store's) if another rank does not.
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


def release_spares(store: Store, ranks: Sequence[int]) -> None:
    """Tells the processes that wait as spares that the run has ended, and waits until they know, at most 5 s.

    Without them nothing happens. Called by rank 0, with whose end the store may go.
    """
    if not ranks:
        return
    store.set(_END, "1")
    end = time.monotonic() + _ANSWER_SECONDS
    while not store.check([_released(rank) for rank in ranks]) and time.monotonic() < end:
        time.sleep(_LONGEST_PAUSE / 10)


def wait_for_release(store: Store, rank: int, stops: Callable[[], bool]) -> None:
    """Returns when the run has ended or `stops` says so. Raises CommError if the store is lost, as the attempt then is.

    For a process that waits as a spare while others train.
    """
    try:
        while not store.check([_END]):
            if stops():
                return
            time.sleep(_LONGEST_PAUSE)
        store.set(_released(rank), "1")
    except RuntimeError as error:
        reason = first_line(error)
        raise CommError(f"this process waited as a spare, and the attempt it waited for is over: {reason}") from error


def _released(rank: int) -> str:
    return f"spares/{rank}"


def _answer(leader: str, rank: int) -> str:
    return f"attempt/{leader}/{rank}"


def _welcome(token: str) -> str:
    return f"attempt/welcome/{token}"
