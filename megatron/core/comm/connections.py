"""Opens the connections that a step uses, before the first step.

[Note: when NCCL makes a communicator]
torch makes a communicator of NCCL at the first call that uses it, and the host waits there until all of its ranks have
made such a call (ProcessGroupNCCL::initNCCLComm). Later calls are only queued. There are two kinds:

- a collective, or a batch of sends and receives, uses the communicator of all ranks of the process group;
- a single send or receive uses one of its two ranks alone, which torch makes per process group and pair.

In a pipeline the first calls of two neighbours do not meet. In 1F1B rank 0 posts the receive of a gradient, in `down`,
before it sends the activation for which rank 1 waits in `up`: both hosts would wait for ever. Moreover, a communicator
that is made during a step may have to wait for the device (NVIDIA/nccl#1082), which may be busy with the receive of a
message whose sender waits for this rank.

So all communicators that are used between the first forward and the last backward are made here, one after the other:
all ranks go through one list, and each takes part where it is a member. No circular wait is possible, because the ranks
of the first communicator that is not made yet wait for no other. The groups along one axis have no rank in common, nor
have the even pairs of neighbours, nor the odd ones: these are made at the same time, and the number of rounds does not
grow with the world.

A barrier connects the neighbours in the rings and trees of a communicator; any other two of its ranks are connected
when they first send each other something (ncclTransportP2pSetup). So ranks that exchange tokens of experts do so once
with a single number, in place of a barrier, as soon as the model is known (`connect_all`).

A communicator takes device memory. So only those pairs are connected that exchange messages, and dp, model and `ends`
are left to their first use: only some runs use them, at the beginning or the end of a step, where no message is in
flight.

init_process_group gets no device_id. With one, torch would make the communicators of all groups at once, but send all
messages of a group in one queue (pytorch PR 154132), in which a receive that is posted early holds up every send behind
it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.comm.all_to_all import all_to_all_async
from megatron.core.comm.collectives import announced, barrier, in_flight
from megatron.core.comm.pipeline_messages import pair_of
from megatron.core.groups import Group, Groups


def open_connections(groups: Groups, device: torch.device, *, ring: bool) -> int:
    """Makes the communicators of this rank that a step uses, see the note; returns their number. Raises CommError.

    ring: whether the last pipeline rank and the first one exchange messages. Collective over the world.
    Communication: one barrier on each group, and one number from each pipeline rank to each of its neighbours.
    """
    with groups.heartbeat.phase("open-connections"):
        lines = _of_a_step(groups)
        for line in lines:
            barrier(line)
        pairs = _pairs(groups, ring=ring)
        for pair in pairs:
            _pass_number(pair, device)
        barrier(groups.world)
    return len(lines) + len(pairs) + (groups.world.size > 1)


def connect_all(group: Group, device: torch.device) -> None:
    """Makes the communicator of a group and connects each two of its ranks, see the note. Raises CommError.

    Collective over the group. Communication: an all-to-all of one number.
    """
    numbers = torch.zeros(group.size, dtype=torch.int32, device=device)
    _, handle = all_to_all_async(numbers, group, f"connecting {group.name}")
    handle.wait()


def _of_a_step(groups: Groups) -> list[Group]:
    """The groups of this rank whose ranks communicate all together; of those that share a process group the first."""
    named = [groups.tp, groups.cp, groups.cp_inner, groups.cp_outer, *groups.contexts.values(), groups.pp]
    for view in groups.views.values():
        named += [view.copies, view.shard, view.gather, view.replicas]
    first: dict[dist.ProcessGroup, Group] = {}
    for group in named:
        if group.process_group is not None:
            first.setdefault(group.process_group, group)
    return list(first.values())


def _pairs(groups: Groups, *, ring: bool) -> list[Group]:
    """This rank's pairs for messages to higher ranks, then those to lower ranks: even neighbours, odd ones, the
    ends."""
    p, rank = groups.pp.size, groups.pp.rank
    neighbours = [(low, low + 1) for parity in (0, 1) for low in range(parity, p - 1, 2)]
    if ring and p > 2:
        neighbours.append((0, p - 1))
    mine = [pair for pair in neighbours if rank in pair]
    return [pair_of(groups, *pair) for pair in mine] + [pair_of(groups, *reversed(pair)) for pair in mine]


def _pass_number(pair: Group, device: torch.device) -> None:
    """Sends the number of the first rank to the second one, and waits until it is there."""
    source, destination = pair.ranks
    number = torch.full((1,), source if pair.rank == 0 else -1, device=device)
    op = "send" if pair.rank == 0 else "receive"
    with announced(op, pair, tuple(number.shape), number.dtype, number.nbytes) as count:
        if pair.rank == 0:
            work = dist.isend(number, destination, pair.process_group)
        else:
            work = dist.irecv(number, source, pair.process_group)
    in_flight(op, pair, number, work, (number,), number=count).wait()
    assert int(number) == source, f"{pair.name}: {int(number)} came"
