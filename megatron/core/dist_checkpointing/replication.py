"""Replicas of local checkpoints: the ranks that keep copies of each other's files, and how these get there.

[Note: replication groups]
Ranks r, r + jump, r + 2 jump, ... are cut into groups of `factor` ranks, and each rank of a group keeps a copy of the
files of the others. With a jump of the ranks of a host, a group has one rank on each of `factor` hosts. Where the
number of hosts is no multiple of `factor`, the last group is larger: its ranks send their files to the next factor - 1
of the group, and the last ones to the first. So files survive the loss of any factor - 1 hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.comm.collectives import gather_objects
from megatron.core.comm.p2p import send_and_receive
from megatron.core.dist_checkpointing.coordination import portable
from megatron.core.groups import Group

BLOCK_BYTES = 16 * 2**20


def replication_groups(world: int, jump: int, factor: int) -> list[tuple[int, ...]]:
    """Returns the groups of a world: see [Note: replication groups]. A rank is alone where there are fewer than
    `factor` ranks at this distance."""
    groups: list[tuple[int, ...]] = []
    for first in range(min(jump, world)):
        line = tuple(range(first, world, jump))
        if factor < 2 or len(line) < factor:
            groups += [(rank,) for rank in line]
            continue
        starts = [number * factor for number in range(len(line) // factor)]
        groups += [line[a:b] for a, b in zip(starts, [*starts[1:], len(line)], strict=True)]
    return groups


def replicate(folder: Path, names: Sequence[str], factor: int, group: Group) -> int:
    """Sends files of `folder` to the next factor - 1 ranks of the group, and writes those of the ranks before into it.

    All ranks of the group call it, also one that has no files because it could not write them. A rank that cannot write
    what it receives raises its CheckpointError when all is received, so that no rank waits. Returns the bytes sent.
    """
    files = gather_objects([(name, (folder / name).stat().st_size) for name in names], group)
    mine, sent = files[group.rank], 0
    failure: OSError | None = None
    for step in range(1, min(factor, group.size)):
        to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
        outgoing = _blocks(folder, mine)
        for name, nbytes in files[source]:
            blocks = _received(nbytes, outgoing, to, source, group)
            try:
                with open(folder / name, "xb") as file:
                    for block in blocks:
                        file.write(block.numpy().data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                failure = failure or error
                for _ in blocks:  # the other ranks send them anyway
                    pass
        for block in outgoing:
            send_and_receive(block, to, None, source, group).wait()
        sent += sum(nbytes for _, nbytes in mine)
    if failure:
        with portable():
            raise failure
    return sent


def _received(nbytes: int, outgoing: Iterator[Tensor], to: int, source: int, group: Group) -> Iterator[Tensor]:
    """Yields the blocks of a file of another rank; a block of `outgoing` is sent while one arrives."""
    for start in range(0, nbytes, BLOCK_BYTES):
        incoming = torch.empty(min(BLOCK_BYTES, nbytes - start), dtype=torch.uint8)
        send_and_receive(next(outgoing, None), to, incoming, source, group).wait()
        yield incoming


def _blocks(folder: Path, files: Sequence[tuple[str, int]]) -> Iterator[Tensor]:
    """Yields the bytes of files, a file after another."""
    for name, nbytes in files:
        with open(folder / name, "rb", buffering=0) as file:
            for start in range(0, nbytes, BLOCK_BYTES):
                block = bytearray(min(BLOCK_BYTES, nbytes - start))
                filled = 0
                while filled < len(block) and (count := file.readinto(memoryview(block)[filled:])):
                    filled += count
                yield torch.frombuffer(block, dtype=torch.uint8)
