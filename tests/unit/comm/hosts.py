"""What the hosts of a job do when NCCL makes its communicators: a simulation, and a stand-in for torch.distributed.

The rule is that of [Note: when NCCL makes a communicator] in core/comm/connections.py: at the first call on a
communicator a host waits until all of its ranks have made one; every other call is only queued. Devices are not
simulated: what is queued never holds up a host.
"""

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

from megatron.core import groups as groups_module
from megatron.core.comm import all_to_all, collectives, connections, p2p, pipeline_messages


class Call(NamedTuple):
    """A call on a communicator: anything that names it, the same on all of its ranks, and these."""

    communicator: object
    ranks: frozenset[int]


class Stuck(AssertionError):
    """Hosts wait for each other."""


def play(hosts, made=()):
    """Returns the communicators made by `hosts`, rank -> calls in order, in addition to `made`. Raises Stuck."""
    made, new, waiting = set(made), [], defaultdict(set)
    done, running = dict.fromkeys(hosts, 0), list(hosts)
    while running:
        rank = running.pop()
        for communicator, ranks in hosts[rank][done[rank] :]:
            if communicator not in made:
                waiting[communicator].add(rank)
                if waiting[communicator] != ranks:
                    break
                made.add(communicator)
                new.append(communicator)
                running += ranks - {rank}
            done[rank] += 1
    stuck = {rank: calls[done[rank]].communicator for rank, calls in hosts.items() if done[rank] < len(calls)}
    if stuck:
        raise Stuck(", ".join(f"rank {rank} waits in {communicator}" for rank, communicator in sorted(stuck.items())))
    return new


class ProcessGroup(NamedTuple):
    """Stands for one of torch's. `number` counts them in the order in which they are made."""

    number: int
    name: str
    ranks: tuple[int, ...]
    high_priority: bool = False


class Queued:
    """Stands for the work of a call on NCCL: the host never waits for it."""

    def wait(self):
        pass

    def is_completed(self):
        return True


class Config:
    """Stands for torch's NCCLConfig: takes the options that NCCL has, and no other."""

    __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas", "net_name")


class Options:
    """Stands for ProcessGroupNCCL.Options."""

    __slots__ = ("_timeout", "config", "is_high_priority_stream")

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config = is_high_priority_stream, Config()

    def given(self):
        """The options of `config` that somebody has set."""
        return {name: getattr(self.config, name) for name in Config.__slots__ if hasattr(self.config, name)}


class FakeNccl:
    """Stands for torch.distributed on one rank; notes its calls, and the process groups in the order of their
    making."""

    def __init__(self, rank, world_size):
        self._rank, self.calls = rank, []
        self.process_groups = [ProcessGroup(0, "world", tuple(range(world_size)))]
        self.group = SimpleNamespace(WORLD=self.process_groups[0])
        self.ProcessGroupNCCL = SimpleNamespace(Options=Options)
        self.options = {}  # of each process group; None for NCCL's own

    def get_backend(self, group=None):
        return "nccl"

    def new_group(self, ranks, timeout, backend, options, group_desc):
        high = options is not None and options.is_high_priority_stream
        self.process_groups.append(ProcessGroup(len(self.process_groups), group_desc, tuple(ranks), high))
        self.options[self.process_groups[-1]] = options
        return self.process_groups[-1]

    def barrier(self, group, device_ids):
        assert device_ids == [0], "NCCL would guess the device"
        self._together(group)

    def gather(self, full, shard, group, async_op):
        return self._together(group)

    def all_to_all_single(self, received, sent, receive=None, send=None, *, group, async_op):
        return self._together(group)

    def P2POp(self, op, tensor, peer, group, tag):
        return group

    def batch_isend_irecv(self, groups):
        return [self._together(groups[0])]

    def all_reduce(self, tensor, op, group, async_op):
        return self._together(group)

    def isend(self, tensor, destination, group):
        self._alone(group, destination)
        return Queued()

    def irecv(self, tensor, source, group):
        self._alone(group, source)
        tensor.fill_(source)
        return Queued()

    def _together(self, group):
        self.calls.append(Call(group, frozenset(group.ranks)))
        return Queued()

    def _alone(self, group, peer):
        pair = frozenset({self._rank, peer})
        assert pair <= set(group.ranks) and len(pair) == 2
        self.calls.append(Call((group, pair), pair))


@contextlib.contextmanager
def nccl(rank, world_size):
    """The code of the body, up to core/comm, believes to be a rank of a world on NCCL; gives the FakeNccl."""
    fake = FakeNccl(rank, world_size)
    with contextlib.ExitStack() as patches:
        for module in (groups_module, all_to_all, collectives, connections, p2p, pipeline_messages):
            patches.enter_context(mock.patch.object(module, "dist", fake))
        patches.enter_context(mock.patch.object(collectives, "gather_into", fake.gather))
        patches.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        yield fake
