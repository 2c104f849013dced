"""Communicators of NCCL are made at set-up, in an order in which no host waits for ever, and none during a step."""

import ast
import functools
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.communicators import CommunicatorOptions, CommunicatorSettings
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import passes_around
from megatron.core.comm.all_to_all import all_to_all_v
from megatron.core.comm.collectives import all_reduce, barrier
from megatron.core.comm.connections import open_connections
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.groups import create_groups, with_experts, with_shared_heads
from megatron.kernels.ops import attention, attention_lse
from megatron.kernels.ops.attention_scores import Scores
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedule import SENDS, TRANSFERS
from tests.unit.comm.hosts import Call, Config, ProcessGroup, Queued, Stuck, nccl, play

CPU = torch.device("cpu")
STREAMS = 32  # that torch has of each priority on a device
# What else takes some, by high priority: dp, model and ends at their first use; in core/streams four directions of the
# mailbox, all-gather, tp, cp, and two each to offload activations, weights and the optimizer; reductions.
OTHER_STREAMS = {False: 16, True: 1}


def create(mesh, rank, *, instances=1, inner=1):
    return create_groups(mesh, rank, Heartbeat(rank), 1.0, optimizer_instances=instances, context_inner=inner)


class TestTheRule:
    """Of the simulation itself."""

    def test_crossed(self):
        first, second = Call("a", frozenset({0, 1})), Call("b", frozenset({0, 1}))
        with pytest.raises(Stuck, match="rank 0 waits in a, rank 1 waits in b"):
            play({0: [first, second], 1: [second, first]})
        assert play({0: [first, second], 1: [second, first]}, made="b") == ["a"]

    def test_in_a_circle(self):
        pairs = [Call(name, frozenset(pair)) for name, pair in (("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2)))]
        a, b, c = pairs
        with pytest.raises(Stuck):
            play({0: [a, c], 1: [b, a], 2: [c, b]})
        assert play({0: [a, c], 1: [a, b], 2: [c, b]}) == ["a", "c", "b"]

    def test_a_rank_that_never_comes(self):
        with pytest.raises(Stuck, match="rank 1 waits in a"):
            play({0: [], 1: [Call("a", frozenset({0, 1}))]})


class Inline:
    """A stream, or Streams, without threads: nothing waits."""

    device = CPU

    def stream(self, name):
        return self

    def submit(self, operation, name, keep):
        list(operation)
        return Queued()

    def begin(self, name):
        return None

    def follow(self, work, span):
        return work


@functools.cache
def messages(p):
    """(rank, whether it sends, its peer) -> the call that the mailbox makes, for all pairs on a ring."""
    calls = {}
    for rank in range(p):
        with nccl(rank, p) as fake:
            box = Mailbox(create(Mesh.create(p, pp=p), rank), Inline())
            for peer in {(rank + 1) % p, (rank - 1) % p}:
                box.send(torch.zeros(1), peer, "")
                box.receive((1,), torch.float32, peer, "").take()
                calls[rank, True, peer], calls[rank, False, peer] = fake.calls[-2:]
    return calls


@functools.cache
def opened(p, ring):
    """The communicators that set-up makes for p pipeline ranks."""
    hosts = {}
    for rank in range(p):
        with nccl(rank, p) as fake:
            open_connections(create(Mesh.create(p, pp=p), rank), CPU, ring=ring)
            hosts[rank] = fake.calls
    return play(hosts)


def step(name, p, m, v, *, overlap):
    """The calls of a step's messages: rank -> in order."""
    schedule, calls = with_transfers(SCHEDULES[name].build(p, m, v=v), overlap=overlap), messages(p)
    return {
        rank: [calls[rank, a.kind in SENDS, schedule.peer(a)] for a in actions if a.kind in TRANSFERS]
        for rank, actions in enumerate(schedule.actions)
    }


EVERY = [(name, v) for name, spec in SCHEDULES.items() for v in (2, 3, 4) if spec.virtual_stages is None]
EVERY += [(name, spec.virtual_stages) for name, spec in SCHEDULES.items() if spec.virtual_stages is not None]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("name", "v"), EVERY)
def test_a_step_makes_no_communicator(name, v, overlap):
    for p in range(2, 17):
        asked = {"num_virtual_stages_per_pipeline_rank": v} if name == "interleaved" else {}
        parallel = ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name, **asked)
        made = opened(p, passes_around(parallel))
        hosts = step(name, p, p + 1, v, overlap=overlap)
        assert play(hosts, made) == [], f"{name}, p {p}"
        used = {call.communicator for calls in hosts.values() for call in calls}
        pairs = {each for each in made if not isinstance(each, ProcessGroup)}
        assert used == pairs, f"{name}, p {p}: a pair is connected and sends nothing"


DEADLOCKS = [(name, 1, p) for name in ("1f1b", "zb-h1") for p in (2, 4, 8)] + [("interleaved", 2, 2)]


@pytest.mark.parametrize(("name", "v", "p"), DEADLOCKS)
def test_without_set_up_the_hosts_wait_for_each_other(name, v, p):
    """The default flags: each of two neighbours posts the receive from the other before its send."""
    with pytest.raises(Stuck, match="rank 0 waits in"):
        play(step(name, p, 2 * p, v, overlap=True))
    play(step(name, p, 2 * p, v, overlap=False))


def worlds(most):
    """(mesh, instances of the sharded optimizer, cp_inner) of up to `most` ranks."""
    for tp, cp, pp, dp in itertools.product((1, 2, 4, 8), range(1, 9), (1, 2, 3, 4, 8, 16, 32, 64), (1, 2)):
        if 1 < tp * cp * pp * dp <= most:
            mesh = Mesh.create(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp)
            inners = [inner for inner in range(1, cp) if cp % inner == 0] or [1]
            yield mesh, None, 1
            for number, inner in enumerate(inners, start=1):
                yield mesh, math.gcd(dp * cp, number), inner


LARGE = [
    (Mesh.create(64, tp=tp, cp=cp, pp=pp), 2, cp // 2) for tp, cp, pp in ((2, 4, 4), (2, 8, 4), (4, 2, 8), (1, 8, 2))
]
LARGE.append((Mesh.create(64, tp=2, cp=4, pp=4, ep=8, etp=1), 2, 2))


def set_up(mesh, rank, instances, inner, *, ring):
    """(what a rank calls, the process groups that it makes)"""
    with nccl(rank, mesh.world_size) as fake:
        groups = create(mesh, rank, instances=instances, inner=inner)
        number = open_connections(groups, CPU, ring=ring)
        assert number == len(fake.calls) == len(set(fake.calls)), "each communicator once"
        if mesh.tp > 2:
            barrier(with_shared_heads(groups, 2, 1.0).tp_inner)
        groups = with_experts(groups, 1.0)
        barrier(groups.etp_ep)
        barrier(groups.tp_cp)
    return fake.calls, fake.process_groups


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(lambda: worlds(12), id="up to 12"),
        pytest.param(lambda: LARGE, id="some of 64"),
        pytest.param(lambda: worlds(64), id="up to 64", marks=pytest.mark.slow),
    ],
)
def test_set_up(cases):
    """Over tp x cp x dp x pp: the order is one in which all hosts arrive, and a rank makes few enough."""
    for number, (mesh, instances, inner) in enumerate(cases()):
        found = [set_up(mesh, rank, instances, inner, ring=number % 2 == 0) for rank in range(mesh.world_size)]
        assert all(made == found[0][1] for _, made in found), "all ranks make the same process groups in the same order"
        play({rank: calls for rank, (calls, _) in enumerate(found)})
        for calls, _ in found:
            high = Counter(priority_of(call.communicator) for call in calls)
            assert all(high[each] + OTHER_STREAMS[each] <= STREAMS for each in high), f"{mesh}: {high}"


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_attention_makes_no_communicator(kind):
    """Forward and backward, over 2 to 8 ranks, of a world in which no other group has the same ranks."""
    least = 2 if kind == "a2a+p2p" else 1
    sizes = [(size, inner) for size in range(2, 9) for inner in range(least, size) if size % inner == 0]
    for cp, inner in sizes:
        mesh, opening, attending = Mesh.create(2 * cp, cp=cp), {}, {}
        for rank in range(2 * cp):
            with nccl(rank, 2 * cp) as fake:
                groups = create(mesh, rank, inner=inner)
                open_connections(groups, CPU, ring=False)
                opening[rank] = fake.calls.copy()
                of_cp = groups.cp, groups.cp_inner, groups.cp_outer
                attend = context_parallel_attention(kind, *of_cp, attention.fused, attention_lse.cpu)
                q, k, v = torch.zeros(3, 4, 1, cp, 8, requires_grad=True)
                attend(q, k, v, scores=Scores(1.0), segments=None, window=None, dropout=0.0).sum().backward()
                attending[rank] = fake.calls[len(opening[rank]) :]
        assert play(attending, play(opening)) == []
        used = {call.communicator.name for calls in attending.values() for call in calls}
        assert used == ({"cp_inner", "cp_outer"} if kind == "a2a+p2p" else {"cp"})


EXPERTS = [
    Mesh.create(8, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    for tp, cp, pp in itertools.product((1, 2), repeat=3)
    for ep, etp in ((1, 2), (2, 1), (2, 2), (4, 1))
]


@pytest.mark.parametrize("mesh", EXPERTS, ids=str)
def test_exchanges_of_experts_make_no_communicator(mesh):
    opening, stepping, dense = {}, {}, {}
    for rank in range(mesh.world_size):
        with nccl(rank, mesh.world_size) as fake:
            groups = create(mesh, rank)
            dense[rank] = len(fake.process_groups)
            assert groups.etp_ep.size == groups.tp_cp.size == 1, "a dense model needs none"
            groups = with_experts(groups, 1.0)
            open_connections(groups, CPU, ring=False)
            barrier(groups.etp_ep)
            barrier(groups.tp_cp)
            opening[rank] = fake.calls.copy()
            rows = [1] * groups.etp_ep.size
            all_to_all_v(torch.zeros(len(rows)), rows, rows, groups.etp_ep)
            all_reduce(torch.zeros(1), groups.tp_cp)
            stepping[rank] = fake.calls[len(opening[rank]) :]
        added = Counter(made.name for made in fake.process_groups[dense[rank] :])
        assert added["etp_ep"] == mesh.pp * mesh.edp, "on connections of its own"
        assert set(added) == ({"etp_ep", "tp_cp"} if mesh.tp > 1 < mesh.cp else {"etp_ep"})
        assert all(made.high_priority for made in fake.process_groups if made.name == "etp_ep")
        assert groups.etp_ep.ranks in mesh.groups("etp", "ep") and groups.tp_cp.ranks in mesh.groups("tp", "cp")
    assert play(stepping, play(opening)) == []


def priority_of(communicator):
    """Whether its stream has high priority."""
    group = communicator if isinstance(communicator, ProcessGroup) else communicator[0]
    return group.high_priority


def test_messages_during_compute_have_high_priority():
    mesh = Mesh.create(64, tp=2, cp=4, pp=4)
    with nccl(0, 64) as fake:
        groups = create(mesh, 0, instances=2, inner=2)
    high = {made.name for made in fake.process_groups if made.high_priority}
    assert high == {"tp", "cp", "cp_inner", "cp_outer", "shard", "gather", "replicas", "up", "down"}
    # One that two groups share has it if one of them needs it.
    with nccl(0, 4) as fake:
        groups = create(Mesh.create(4, cp=2, pp=2), 0)
    assert groups.cp.process_group is groups.dp_cp.process_group and groups.cp.process_group.high_priority
    assert not groups.pp.process_group.high_priority


@pytest.mark.parametrize(
    ("around", "fields"),
    [
        (False, {}),
        (False, {"pipeline_schedule": "zb-h1"}),
        (False, {"pipeline_schedule": "zb-v"}),
        (False, {"pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 2}),
        (False, {"num_virtual_stages_per_pipeline_rank": 1}),
        (True, {"num_virtual_stages_per_pipeline_rank": 2}),
        (True, {"num_layers_per_virtual_pipeline_stage": 2}),
        (False, {"pipeline_model_parallel_layout": "Et|tt|tt|tL"}),
        (True, {"pipeline_model_parallel_layout": "Et|tt|tt|tt|tt|tt|tt|tL"}),
    ],
)
def test_messages_from_the_last_rank_to_the_first(around, fields):
    assert passes_around(ParallelConfig(pipeline_model_parallel_size=4, **fields)) is around


def test_options_of_nccl():
    """A communicator gets the options of all groups that it serves; those of messages beside compute have high
    priority."""
    named = {
        "dp": CommunicatorOptions(max_ctas=4, net_name="IB"),
        "dp_cp": CommunicatorOptions(max_ctas=16, cga_cluster_size=2),
        "pp": CommunicatorOptions(max_ctas=2),
        "cp": CommunicatorOptions(is_high_priority_stream=False),
        "mp": CommunicatorOptions(is_high_priority_stream=True),
        "ep_dp": CommunicatorOptions(min_ctas=3),
        "tp_ep_mp": CommunicatorOptions(max_ctas=8),
    }
    mesh = Mesh.create(32, tp=2, cp=2, pp=2, ep=4, etp=2)
    with nccl(0, 32) as fake:
        groups = create_groups(mesh, 0, Heartbeat(0), 1.0, options=CommunicatorSettings(named))
        with_experts(groups, 1.0, CommunicatorSettings(named))
    found = {made.name: options for made, options in fake.options.items() if made.ranks[0] == 0}
    given = {name: {} if options is None else options.given() for name, options in found.items()}
    wide = {"max_ctas": 16, "cga_cluster_size": 2}
    assert given["dp"] == {"max_ctas": 4, "net_name": "IB"}
    assert given["dp_cp"] == given["gather"] == wide
    assert given["up"] == given["down"] == {"max_ctas": 2}
    assert given["expert_gather"] == given["edp"] == {"min_ctas": 3}
    assert given["etp_ep"] == {"max_ctas": 8}
    assert given["tp"] == given["cp"] == given["model"] == {}
    high = {name for name, options in found.items() if options is not None and options.is_high_priority_stream}
    assert {"tp", "model", "up", "down", "gather", "expert_gather", "etp_ep"} <= high
    assert not {"cp", "dp", "dp_cp", "edp"} & high
    assert found["cp"] is None or not found["cp"].is_high_priority_stream


def test_options_of_a_shared_communicator():
    """Without context parallelism the ranks of dp and dp_cp are the same: one communicator, and the wider name's
    options unless the narrower one has its own.
    """
    named = {"dp": CommunicatorOptions(max_ctas=4, min_ctas=2), "dp_cp": CommunicatorOptions(max_ctas=16)}
    with nccl(0, 4) as fake:
        create_groups(Mesh.create(4, tp=2), 0, Heartbeat(0), 1.0, options=CommunicatorSettings(named))
    (made,) = [made for made in fake.options if made.ranks == (0, 2) and made.name == "dp"]
    assert fake.options[made].given() == {"max_ctas": 16, "min_ctas": 2}


def test_the_stand_in_has_the_attributes_of_torch():
    stub = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    (nccl_class,) = [n for n in ast.walk(ast.parse(stub.read_text())) if getattr(n, "name", "") == "ProcessGroupNCCL"]
    inner = {node.name: node for node in nccl_class.body if isinstance(node, ast.ClassDef)}
    declared = {
        name: {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)} for name, node in inner.items()
    }
    # torch binds net_name as well (torch/csrc/distributed/c10d/init.cpp); its stub leaves it out.
    assert set(Config.__slots__) - declared["NCCLConfig"] == {"net_name"}
    assert {"config", "is_high_priority_stream"} <= declared["Options"]
