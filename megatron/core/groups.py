"""Process groups of a mesh: one immutable object, built once and passed to everything that communicates."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron.base.errors import CommError, ConfigError, first_line
from megatron.base.heartbeat import Heartbeat, Notice
from megatron.base.mesh import DENSE, EXPERT, Mesh
from megatron.base.rendezvous import agree_on_attempt, release_spares, wait_for_release
from megatron.config.communicators import CommunicatorSettings


@dataclass(frozen=True)
class Group:
    """Ranks that communicate along some axes of the mesh, in axis order. A group of one never communicates."""

    name: str
    ranks: tuple[int, ...]
    rank: int  # index of this process in `ranks`
    process_group: dist.ProcessGroup | None  # None when the group has one rank
    heartbeat: Heartbeat

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class View:
    """How ranks share the parameters of one view of the mesh: dense ones (tp; cp x dp) or experts (etp x ep; edp).

    name: as in `Mesh.views`. copies: the ranks that hold the same parameters, and sum their gradients. shard, replicas:
    `copies` once more, cut into instances of the sharded optimizer: `shard` are the ranks of one instance, which share
    its state, `replicas` those that hold the same shard in other instances. gather: `shard` again. These three carry
    whole buckets during compute, so they have their own connections: no short message waits for them.
    """

    name: str
    copies: Group
    shard: Group
    gather: Group
    replicas: Group

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a flat tensor that the ranks of `shard` cut into equal ones."""
        return flat.view(self.shard.size, -1)[self.shard.rank]


@dataclass(frozen=True)
class Groups:
    """Every group this rank is in.

    tp: shards of a layer. tp_inner: neighbours along tp that hold the same key and value heads. cp: shards of a
    sequence; cp_inner, cp_outer: cp as neighbours, and as the ranks of the same place among theirs. dp: replicas that
    see other samples. pp: stages. up, down: pp again, for messages to higher and to lower ranks, which must not wait
    for each other. ends: the first and the last stage, on both of them; alone elsewhere. dp_cp: ranks with other parts
    of the batch. model (tp x pp): ranks that hold different parameters of one replica. ep: experts. etp: shards of an
    expert. edp: ranks with the same experts. etp_ep: ranks that send each other tokens for their experts. tp_cp: ranks
    that hold parts of the same samples. Each is this rank alone if the model has no experts, see `with_experts`. views:
    how parameters are shared, by the names in `Mesh.views`. contexts: runs of ranks of dp x cp that share a sequence in
    place of `cp`, by their size; empty where all sequences are shared by `cp`.
    """

    mesh: Mesh
    rank: int
    heartbeat: Heartbeat
    world: Group
    tp: Group
    tp_inner: Group
    cp: Group
    cp_inner: Group
    cp_outer: Group
    dp: Group
    pp: Group
    up: Group
    down: Group
    ends: Group
    dp_cp: Group
    model: Group
    ep: Group
    etp: Group
    edp: Group
    etp_ep: Group
    tp_cp: Group
    views: dict[str, View]
    contexts: dict[int, Group]

    def along(self, axis: str | None) -> Group:
        """The ranks that share a parameter with this `ParamSpec.axis`. Without an axis it is copied along tp."""
        return {None: self.tp, "tp": self.tp, "etp": self.etp, "ep": self.ep}[axis]

    def view(self, axis: str | None) -> View:
        """How ranks share the parameters with this `ParamSpec.axis`; None: those that every rank of tp holds."""
        return self.views[self.mesh.view(axis)]


_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "model": ("tp", "pp"),
    "ep": ("ep",),
    "etp": ("etp",),
    "edp": ("edp",),
}
# The groups that become `View.copies`.
_COPIES = {DENSE: "dp_cp", EXPERT: "edp"}

# [Note: priority of messages]
# NCCL runs the kernels of a communicator on a stream of the communicator's own, whatever stream they were started from.
# Groups whose messages are overlapped with compute get high-priority streams: a message then starts even during a GEMM
# that occupies the device. torch takes all streams, NCCL's and those of core/streams, in turn from 32 per device and
# priority (c10/cuda/CUDAStream.h). Two that get the same one wait for each other, and a receive that is posted early
# would then hold up the message that it is the answer to. So a rank has far fewer communicators of either priority.
# --high-priority-stream-groups and --nccl-communicator-config-path have the last word (config/communicators.py).
_OF_EXPERTS = f"{EXPERT}_"  # begins the names of groups of the view of experts
_NO_OPTIONS = CommunicatorSettings()
_OVERLAPPED = {"tp", "cp", "cp_inner", "cp_outer", "shard", "gather", "replicas", "up", "down", "etp_ep"}


def connect(rank: int, world_size: int, *, backend: str, timeout_seconds: float, spares: int = 0) -> Heartbeat:
    """Joins the job through torchrun's store (environment variables); returns this rank's heartbeat, not yet started.

    `backend` is "nccl" or "gloo". `spares` further processes call `wait_as_spare`. A world of one needs no backend, and
    without spares no launcher and no store. Raises CommError if the other processes do not join within the timeout.
    """
    if world_size + spares == 1:
        return Heartbeat(rank, timeout=timeout_seconds)
    store = _attempt_store(rank, world_size + spares, timeout_seconds)
    if world_size > 1:
        timeout = timedelta(seconds=timeout_seconds)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except RuntimeError as error:
            raise _missing(world_size + spares, timeout_seconds, error) from error
    publish, read = store_transport(store, rank)
    # Only torchrun is known to wait for its ranks: a shell that started this process may end before it.
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    notice = StoreNotice(store, range(world_size, world_size + spares))
    return Heartbeat(rank, publish=publish, read=read, notice=notice, timeout=timeout_seconds, launcher=launcher)


def wait_as_spare(rank: int, world_size: int, *, timeout_seconds: float, stops: Callable[[], bool]) -> None:
    """Waits while ranks below this one train, until their run ends, `stops` says so, or they are lost (CommError).

    `world_size` counts all processes of the job.
    """
    wait_for_release(_attempt_store(rank, world_size, timeout_seconds), rank, stops)


def _attempt_store(rank: int, processes: int, timeout_seconds: float) -> Store:
    """Returns the part of torchrun's store that belongs to this attempt of the job. Raises CommError."""
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {processes} but MASTER_ADDR is not set; start the job with torchrun")
    try:
        base_store, _, _ = next(rendezvous("env://", rank, processes, timeout=timedelta(seconds=timeout_seconds)))
        base_store.set_timeout(timedelta(seconds=timeout_seconds))
        return PrefixStore(agree_on_attempt(base_store, rank, processes, timeout_seconds), base_store)
    except (RuntimeError, CommError) as error:  # the store raises RuntimeError when somebody is missing
        raise _missing(processes, timeout_seconds, error) from error


def _missing(processes: int, timeout_seconds: float, error: Exception) -> CommError:
    return CommError(
        f"could not meet the other {processes - 1} processes at {os.environ['MASTER_ADDR']}:"
        f"{os.environ.get('MASTER_PORT')} within {timeout_seconds:g} s: {first_line(error)}"
    )


class StoreNotice(Notice):
    """A Notice in the key-value store of the job, over a connection of its own: see `store_transport`."""

    def __init__(self, store: Store, spares: Sequence[int] = ()) -> None:
        super().__init__()
        self._job_store, self._spares = store, spares
        self._store = PrefixStore("notice", store.clone())  # type: ignore[attr-defined]

    def leave(self, text: str, topic: str = "text") -> None:
        """See Notice."""
        self._store.set(topic, text)

    def read(self, topic: str = "text") -> str | None:
        """See Notice."""
        return self._store.get(topic).decode() if self._store.check([topic]) else None

    def claim(self, text: str, topic: str) -> str:
        """See Notice."""
        return self._store.compare_set(topic, "", text).decode()

    def release_spares(self) -> None:
        """See Notice."""
        release_spares(self._job_store, self._spares)


def store_transport(store: Store, rank: int) -> tuple[Callable[[str], None], Callable[[int], str | None]]:
    """Returns (publish, read) over a key-value store.

    It uses a separate connection, because the heartbeat thread must never wait for a lock that the main thread holds
    inside a blocking store call.
    """
    heartbeat_store = PrefixStore("heartbeat", store.clone())  # type: ignore[attr-defined]

    def publish(line: str) -> None:
        heartbeat_store.set(str(rank), line)

    def read(other: int) -> str | None:
        return heartbeat_store.get(str(other)).decode() if heartbeat_store.check([str(other)]) else None

    return publish, read


def create_groups(
    mesh: Mesh,
    rank: int,
    heartbeat: Heartbeat,
    timeout_seconds: float,
    *,
    optimizer_instances: int | None = 1,
    context_inner: int = 1,
    context_sizes: Sequence[int] = (),
    options: CommunicatorSettings = _NO_OPTIONS,
) -> Groups:
    """Creates every group of the mesh. Collective over the world: all ranks create all groups in the same order.

    `optimizer_instances` divides dp x cp, and edp; an instance is a run of neighbouring ranks. None makes every rank an
    instance, so that nothing is sharded. `context_inner` is the size of cp_inner. `context_sizes`: of `contexts`.
    `options`: of NCCL's communicators; one that several groups share has those of all of them. For tp_inner see
    `with_shared_heads`, for etp_ep and tp_cp `with_experts`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    groups: dict[str, Group] = {}
    shared = {name: mesh.groups(*axes) for name, axes in _AXES.items()} | mesh.context_groups(context_inner)
    sized = {f"cp_of_{size}": mesh.sized_groups(size) for size in context_sizes}
    shared |= sized
    # Axes that vary over the same ranks (dp and dp_cp at cp 1) share one communicator: fewer buffers on NCCL.
    names: dict[tuple[int, ...], list[str]] = {}
    for name, lists in shared.items():
        for ranks in lists:
            names.setdefault(ranks, []).append("cp" if name in sized else name)
    for name, lists in shared.items():
        for ranks in lists:
            if ranks not in process_groups:
                process_groups[ranks] = _new_group(ranks, names[ranks], timeout, options)
            if rank in ranks:
                groups[name] = Group(name, ranks, ranks.index(rank), process_groups[ranks], heartbeat)
    views = {}
    for view in mesh.views:
        prefix = "" if view == DENSE else _OF_EXPERTS
        cut = mesh.optimizer_groups(optimizer_instances, view)
        parts = _with_own_connections(cut, rank, heartbeat, timeout, options, prefix=prefix)
        views[view] = View(view, groups[_COPIES[view]], **parts)
    contexts = {len(groups[name].ranks): groups.pop(name) for name in sized}
    groups |= _with_own_connections(mesh.pipeline_groups(), rank, heartbeat, timeout, options)
    for name in ("tp_inner", "etp_ep", "tp_cp"):
        groups[name] = Group(name, (rank,), 0, None, heartbeat)
    everyone = tuple(range(mesh.world_size))
    world = Group("world", everyone, rank, dist.group.WORLD if mesh.world_size > 1 else None, heartbeat)
    return Groups(mesh=mesh, rank=rank, heartbeat=heartbeat, world=world, views=views, contexts=contexts, **groups)


def _with_own_connections(
    lists: dict[str, list[tuple[int, ...]]],
    rank: int,
    heartbeat: Heartbeat,
    timeout: timedelta,
    options: CommunicatorSettings,
    *,
    prefix: str = "",
) -> dict[str, Group]:
    """This rank's group of each of `lists`, on connections that no other group uses. Collective over the world.

    prefix: of the groups' own names, which heartbeats count by.
    """
    groups = {}
    for name, rank_lists in lists.items():
        for ranks in rank_lists:
            process_group = _new_group(ranks, [prefix + name], timeout, options)
            if rank in ranks:
                groups[name] = Group(prefix + name, ranks, ranks.index(rank), process_group, heartbeat)
    return groups


def with_shared_heads(
    groups: Groups, holders: int, timeout_seconds: float, options: CommunicatorSettings = _NO_OPTIONS
) -> Groups:
    """Returns the groups with a tp_inner of `holders` neighbours, which divide tp. Collective over the world.

    The number follows from the model: it is above one if there are fewer key/value heads than tp ranks.
    """
    inner = groups.tp_inner
    if holders == groups.tp.size:
        inner = dataclasses.replace(groups.tp, name="tp_inner")
    elif holders > 1:
        timeout = timedelta(seconds=timeout_seconds)
        for ranks in groups.mesh.tensor_groups(holders):
            process_group = _new_group(ranks, ["tp_inner"], timeout, options)
            if groups.rank in ranks:
                inner = Group("tp_inner", ranks, ranks.index(groups.rank), process_group, groups.heartbeat)
    return dataclasses.replace(groups, tp_inner=inner)


def with_experts(groups: Groups, timeout_seconds: float, options: CommunicatorSettings = _NO_OPTIONS) -> Groups:
    """Returns the groups with the etp_ep and tp_cp of a model with experts. Collective over the world.

    etp_ep has connections of its own: no short message waits behind an exchange of tokens.
    """
    mesh, timeout = groups.mesh, timedelta(seconds=timeout_seconds)
    exchange = {"etp_ep": mesh.groups("etp", "ep")}
    connected = _with_own_connections(exchange, groups.rank, groups.heartbeat, timeout, options)
    if mesh.cp == 1:
        connected["tp_cp"] = dataclasses.replace(groups.tp, name="tp_cp")
    elif mesh.tp == 1:
        connected["tp_cp"] = dataclasses.replace(groups.cp, name="tp_cp")
    else:
        parts = {"tp_cp": mesh.groups("tp", "cp")}
        connected |= _with_own_connections(parts, groups.rank, groups.heartbeat, timeout, options)
    return dataclasses.replace(groups, etp_ep=connected["etp_ep"], tp_cp=connected["tp_cp"])


def thread_group(lists: Sequence[tuple[int, ...]], groups: Groups, timeout_seconds: float) -> Group:
    """Returns this rank's group among `lists`, over which a thread sends tensors in host memory while training
    communicates.

    It is always of gloo, and has connections of its own; its calls do not change the heartbeat of the rank. Collective
    over the world.
    """
    result = Group("thread", (groups.rank,), 0, None, Heartbeat(groups.rank, timeout=timeout_seconds))
    _register_shared_gloo()
    for ranks in lists:
        if len(ranks) == 1:
            continue
        timeout = timedelta(seconds=timeout_seconds)
        process_group = dist.new_group(list(ranks), timeout, _SHARED_GLOO, group_desc="thread")
        if groups.rank in ranks:
            result = dataclasses.replace(
                result, ranks=ranks, rank=ranks.index(groups.rank), process_group=process_group
            )
    return result


def _new_group(
    ranks: tuple[int, ...], names: Sequence[str], timeout: timedelta, options: CommunicatorSettings
) -> dist.ProcessGroup | None:
    """A communicator of these ranks, or None for one rank. Collective over the world, not over these ranks alone: torch
    would then name the group after the number of groups that this rank is in, which differs between its members.

    names: of the groups that it serves. On NCCL nothing is connected yet: see comm/connections.py.
    """
    if len(ranks) == 1:
        return None
    backend, of_group = None, None
    if dist.get_backend() == "gloo":
        backend = _SHARED_GLOO
        _register_shared_gloo()
    elif dist.get_backend() == "nccl":
        of_group = _nccl_options(names, timeout, options)
    return dist.new_group(list(ranks), timeout, backend, of_group, group_desc=names[0])


def _nccl_options(
    names: Sequence[str], timeout: timedelta, options: CommunicatorSettings
) -> dist.ProcessGroupNCCL.Options | None:
    """Returns what torch passes to NCCL for a communicator of these groups; None where all is NCCL's own choice."""
    settings = options.of(names).given()
    # See [Note: priority of messages].
    high = settings.pop("is_high_priority_stream", any(name.removeprefix(_OF_EXPERTS) in _OVERLAPPED for name in names))
    if not high and not settings:
        return None
    nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=bool(high))
    nccl_options._timeout = timeout
    for name, value in settings.items():
        setattr(nccl_options.config, name, value)
    return nccl_options


# [Note: one gloo device]
# A gloo device owns a thread that wakes 100 times per second, also when nothing is sent, and a listening socket. torch
# makes a device per group, and a mesh has a dozen groups: the threads of a process that made some meshes take more than
# a core, and opening the devices takes half the time of making the groups. One device can serve any number of groups;
# torch has no argument for that in new_group, but a backend of one's own may make torch's ProcessGroupGloo with a given
# device.
_SHARED_GLOO = "gloo_shared"


@functools.cache
def _register_shared_gloo() -> None:
    """Make the backend `_SHARED_GLOO`, whose groups share one device (one per interface). See the note."""
    gloo, interfaces = (
        dist.ProcessGroupGloo,
        os.environ.get("GLOO_SOCKET_IFNAME"),
    )  # as torch reads it: names with commas
    options = gloo._Options  # type: ignore[attr-defined]
    if interfaces:
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_default_device()]

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        of_group = options()
        of_group._devices, of_group._timeout = devices, timeout
        return gloo(store, rank, size, of_group)

    dist.Backend.register_backend(_SHARED_GLOO, create, devices=["cpu"])


def disconnect(heartbeat: Heartbeat) -> None:
    """Leave the job at the end of a run."""
    heartbeat.stop()
    if heartbeat.rank == 0:
        heartbeat.notice.release_spares()
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(device: torch.device, name: str | None) -> str:
    """Returns the communication backend: the requested one, by default NCCL, and always gloo on the CPU."""
    return (name or "nccl") if device.type == "cuda" else "gloo"
