"""Times messages between hosts, to tell a slow link from a rank that arrives late at its collectives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.core.comm.collectives import announced, in_flight
from megatron.core.device import synchronize
from megatron.core.groups import Group

NBYTES = 1 << 20  # of a message in each direction
ROUNDS = 15  # every host exchanges messages with so many others at most
_REPEATS = 3
SLOW_FACTOR, SLOW_SECONDS = 3.0, 0.001  # of the time of other links, or of the same one before

Link = tuple[int, int]  # two ranks, the lower one first


def pairings(ranks: Sequence[int]) -> list[list[Link]]:
    """Returns rounds in which every rank has one partner at most: all pairs, or those of the first `ROUNDS` rounds."""
    if len(ranks) < 2:
        return []
    places: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(min(len(places) - 1, ROUNDS)):
        pairs = zip(places[: len(places) // 2], reversed(places), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]  # the circle method
    return rounds


def link_times(world: Group, rounds: Sequence[Sequence[Link]], device: torch.device) -> dict[Link, float]:
    """Returns the seconds in which 1 MiB passes in both directions of each link of this rank, the best of three.

    Communication: with one partner after the other. A short message goes first, so that the time does not hold the
    delay of a partner that comes late.
    """
    seconds = {}
    for pairs in rounds:
        for link in pairs:
            if world.rank in link:
                seconds[link] = _time(world, link, device)
    return seconds


def slow_links(now: Mapping[Link, float], before: Mapping[Link, float]) -> dict[Link, float]:
    """Returns the links that take several times as long as most others, or as they did before, each with that time.

    before: the same links at an earlier moment; may be empty.
    """
    slow = {}
    for link, seconds in now.items():
        elsewhere = sorted(time_of_peer for peer, time_of_peer in now.items() if peer != link)
        # A slow host slows all of its links: with a few hosts the median would be one of them.
        usual = [before[link]] if link in before else []
        usual += [elsewhere[len(elsewhere) // 4]] if elsewhere else []
        if usual and seconds >= SLOW_FACTOR * min(usual) and seconds - min(usual) >= SLOW_SECONDS:
            slow[link] = min(usual)
    return slow


def shared_rank(links: Sequence[Link]) -> int | None:
    """Returns the rank that is at one end of all links, if there are several and one such rank."""
    shared = set(links[0]).intersection(*links[1:]) if len(links) > 1 else set()
    return shared.pop() if len(shared) == 1 else None


def _time(world: Group, link: Link, device: torch.device) -> float:
    pair = Group(f"link {link[0]}-{link[1]}", link, link.index(world.rank), world.process_group, world.heartbeat)
    short = torch.zeros(1, dtype=torch.uint8, device=device)
    long = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    _swap(pair, long)  # opens the connection
    seconds = []
    for _ in range(_REPEATS):
        _swap(pair, short)
        synchronize(device)
        started = time.perf_counter()
        _swap(pair, long)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _swap(pair: Group, sent: torch.Tensor) -> None:
    received, other = torch.empty_like(sent), pair.ranks[1 - pair.rank]
    with announced("swap", pair, tuple(sent.shape), sent.dtype, sent.nbytes):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, other, pair.process_group),
                dist.P2POp(dist.isend, sent, other, pair.process_group),
            ]
        )
    for work in works:
        in_flight("swap", pair, sent, work, (sent, received)).wait()
