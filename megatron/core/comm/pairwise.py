"""Collectives of large CPU tensors as direct messages between every pair of ranks.

gloo's reduce-scatter moves as much as an all-reduce, and its rings wait at every hop. Here each rank sends every other
rank just the slice that one needs, straight from the tensor, all slices at once: (n - 1)/n of the tensor out and in,
the least possible, in one hop, and both directions of a link are busy. Sums are taken in rank order, so a result does
not depend on how a buffer was split, and the same bits come out of every strategy that reduces this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.groups import Group


class Transfer(NamedTuple):
    """A slice in flight."""

    work: Any
    direction: str  # "from" or "to"
    rank: int  # the other one

    def wait(self) -> None:
        """Return when it has arrived or left. Raises RuntimeError naming the other rank."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"a slice {self.direction} rank {self.rank}: {error}") from error


def exchange(group: Group, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Transfer]:
    """Start to send `outgoing[r]` to each other rank r of the group and to receive `incoming[r]` from it.

    Contiguous CPU tensors, which must live until every returned work has been waited for. Receives are posted first:
    gloo sends a message only when its receive is posted.
    """
    peers = [(group.rank + i) % group.size for i in range(1, group.size)]
    received = [receive(group, incoming[r], r, tag) for r in reversed(peers)]
    return received + [send(group, outgoing[r], r, tag) for r in peers]


def receive(group: Group, incoming: Tensor, r: int, tag: int) -> Transfer:
    """Start to receive the message of rank number r of the group with this tag; see `exchange`."""
    # The process group's own calls: dist.isend and irecv check and log each time, ten times as long.
    assert group.process_group is not None
    return Transfer(group.process_group.recv([incoming], r, tag), "from", group.ranks[r])


def send(group: Group, outgoing: Tensor, r: int, tag: int) -> Transfer:
    """Start to send to rank number r of the group; see `exchange`."""
    assert group.process_group is not None
    return Transfer(group.process_group.send([outgoing], r, tag), "to", group.ranks[r])


def sum_in_rank_order(pieces: Sequence[Tensor], rank: int, out: Tensor) -> None:
    """out = pieces[0] + pieces[1] + ..., added in this order; `out` may be `pieces[rank]`, the others are overwritten.

    Half-precision pieces are added in fp32 and rounded once.
    """
    if pieces[0].dtype.itemsize == 2:
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        out.copy_(total)
        return
    # The running sum may not overwrite this rank's own piece before its turn.
    total = pieces[0]
    for r, piece in enumerate(pieces[1:], start=1):
        total = torch.add(total, piece, out=out if r >= rank else pieces[0])


def staging_like(pieces: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Memory to receive each other rank's version of this rank's piece; the own piece stands for itself."""
    local = pieces[rank]
    received = local.new_empty((len(pieces) - 1, *local.shape)).unbind()
    return [*received[:rank], local, *received[rank:]]
