"""The exchange of tokens between the ranks that share experts."""

import contextlib
import dataclasses
import itertools

import pytest
import torch

from megatron.core.comm.all_to_all import all_to_all_v, all_to_all_v_async
from megatron.core.expert_parallel.dispatch import AllGather, AllToAll, Local, Scattered
from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.moe.layer import MoELayer
from megatron.spec.collectives import ExchangeSizes, exchange_collectives, gathered_exchange_collectives
from tests import pool
from tests.adversary.runtime import LATE, SHUFFLED
from tests.adversary.seams import adversary
from tests.unit.models.builds import LLAMA, make_build

# Rows from rank (first) to rank (second), by number of ranks: even, uneven, and with ranks that send or receive none.
SPLITS = {
    "even": lambda source, to: 2,
    "uneven": lambda source, to: (3 * source + 5 * to) % 4,
    "all to the last": lambda source, to: 4 * (to == 1),
    "all from the first": lambda source, to: 3 * (source == 0),
    "none": lambda source, to: 0,
}


def rows_of(source, to, rows, *shape):
    """Rows that tell where they come from and go to."""
    number = torch.arange(rows * torch.Size(shape).numel(), dtype=torch.float32).view(rows, *shape)
    return number + 1000 * source + 100 * to


def exchanged(rank, size, name, mode):
    """(what arrived, what should have, whether the input is unchanged, the calls)"""
    split, found = SPLITS[name], []
    group = pool.groups(ep=size, etp=1, experts=True).etp_ep
    send, receive = [split(rank, to) for to in range(size)], [split(source, rank) for source in range(size)]
    with group.heartbeat.record() as calls:
        for shape in ((3,), (), (2, 2)):
            mine = torch.cat([rows_of(rank, to, send[to], *shape) for to in range(size)])
            expected = torch.cat([rows_of(source, rank, receive[source], *shape) for source in range(size)])
            before = mine.clone()
            if mode is None:
                found.append((all_to_all_v(mine, send, receive, group), expected, mine, before))
                continue
            with adversary(mode, seed=rank):
                received, handle = all_to_all_v_async(mine, send, receive, group)
                second, other = all_to_all_v_async(mine, send, receive, group)
                other.wait()
                handle.wait()
                assert received.equal(second)
                found.append((received, expected, mine, before))
    assert all(received.equal(expected) and mine.equal(before) for received, expected, mine, before in found)
    return [(call.op, call.group, call.nbytes) for call in calls], sum(send)


@pytest.mark.parametrize("mode", [None, LATE, SHUFFLED], ids=str)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("size", [2, 4])
def test_rows_arrive_in_rank_order(size, name, mode):
    for calls, sent in pool.run(size, exchanged, name, mode):
        counted = [("all_to_all_v", "etp_ep", 4 * sent * width) for width in (3, 1, 4)]
        assert calls == (counted if mode is None else [call for call in counted for _ in range(2)])


def test_a_group_of_one_exchanges_nothing():
    group, x = pool.groups(experts=True).etp_ep, torch.ones(3, 2)
    with group.heartbeat.record() as calls:
        assert all_to_all_v(x, [3], [3], group) is x
    assert calls == []


HIDDEN, WIDTH = 6, 4
# Tokens of the rank with this number, of n; experts; k; and the choice for a token, or None for a random one.
ROUTINGS = {
    "random": (lambda rank, n: 5 + 0 * rank, 8, 3, None),
    "some absent": (lambda rank, n: 5, 8, 3, "some absent"),
    "uneven": (lambda rank, n: 3 * rank + 2, 4, 2, None),
    "one rank has no tokens": (lambda rank, n: 4 * (rank != n - 1), 4, 2, None),
    "one expert": (lambda rank, n: 6, 4, 1, [3]),
    "one rank": (lambda rank, n: 4, 8, 2, [1, 0]),
    "every expert": (lambda rank, n: 3, 4, 4, None),
    "none": (lambda rank, n: 3, 4, 2, [-1, -1]),
    "one token": (lambda rank, n: 1 * (rank == 0), 4, 2, None),
}
EVEN = [name for name, (tokens, *_) in ROUTINGS.items() if len({tokens(rank, 4) for rank in range(4)}) == 1]
LAYOUTS = {"ep 1": (1, 1, 1), "ep 2": (2, 2, 1), "etp 2": (2, 1, 2), "ep 4": (4, 4, 1), "ep 2 etp 2": (4, 2, 2)}
LAYOUTS["ep 2 edp 2"] = (4, 2, 1)


def whole(shape, seed):
    """Small whole numbers, so that sums are exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def data(rank, n, name):
    """(x, indices, weights, gradient of the result) of a rank of `n` that exchange tokens."""
    tokens_of, experts, k, chosen = ROUTINGS[name]
    tokens = tokens_of(rank, n)
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank))
    indices = scores.topk(k).indices if not isinstance(chosen, list) else torch.tensor([chosen] * tokens).view(-1, k)
    if chosen == "some absent":
        indices = indices.masked_fill(scores[:, :k] < 0.3, -1)
    x, grad = whole((tokens, HIDDEN), 10 + rank), whole((tokens, HIDDEN), 20 + rank)
    return x, indices, whole((tokens, k), 30 + rank), grad


def parameters(experts):
    """(first, second matrices) [experts, WIDTH, HIDDEN] and [experts, HIDDEN, WIDTH]"""
    return whole((experts, WIDTH, HIDDEN), 1), whole((experts, HIDDEN, WIDTH), 2)


def run_experts(dispatched, first, second):
    """The rows' sums of w * second @ first @ row over the local experts."""
    rows, weights, (places, ends, sizes, _) = dispatched[:3]
    assert sum(sizes) == len(places) == len(weights) and len(sizes) == len(first)
    assert ends.dtype == torch.int32 and ends.tolist() == list(itertools.accumulate(sizes))
    out, done = torch.zeros_like(rows), 0
    for expert, size in enumerate(sizes):
        mine, weight = places[done : done + size], weights[done : done + size].unsqueeze(1)
        out = out.index_add(0, mine, (rows[mine] @ first[expert].t() * weight) @ second[expert].t())
        done += size
    return out


def by_one_process(x, indices, weights, grad, first, second):
    """(result, gradients of x, weights, first, second)"""
    leaves = [each.clone().requires_grad_() for each in (x, weights, first, second)]
    x, weights, first, second = leaves
    out = torch.zeros_like(x)
    for slot, expert in enumerate(indices.t()):
        routed = (expert >= 0).unsqueeze(1)
        inner = torch.einsum("tfh,th->tf", first[expert.clamp(min=0)], x) * weights[:, slot : slot + 1]
        out = out + torch.where(routed, torch.einsum("thf,tf->th", second[expert.clamp(min=0)], inner), 0.0)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def build(kind, groups, experts):
    group, etp = groups.etp_ep, groups.mesh.etp
    if kind == "Local":
        return Local(experts)
    return (AllToAll if kind == "AllToAll" else AllGather)(group, experts, etp)


def sharded(groups, first, second):
    """This rank's experts, and of each its part of the inner channels."""
    ep, etp = groups.ep, groups.etp
    first, second = (each.chunk(ep.size)[ep.rank] for each in (first, second))
    return first.chunk(etp.size, 1)[etp.rank].clone(), second.chunk(etp.size, 2)[etp.rank].clone()


def there_and_back(dispatcher, x, indices, weights, grad, first, second):
    """(result, gradients of x, weights, first, second, what was dispatched)"""
    leaves = [each.clone().requires_grad_() for each in (x, weights, first, second)]
    dispatched = dispatcher.start(leaves[0], indices, leaves[1]).finish()
    out = dispatcher.combine(run_experts(dispatched, *leaves[2:]), dispatched)
    return out.detach(), *torch.autograd.grad(out, leaves, grad), dispatched


def compare(rank, size, ep, etp, kind, names):
    """Result and gradients against one process that has all tokens and all experts."""
    groups = pool.groups(ep=ep, etp=etp, experts=True)
    n, place = groups.etp_ep.size, groups.etp_ep.rank
    for name in names:
        experts = ROUTINGS[name][1]
        every = [data(each, n, name) for each in range(n)]
        first, second = parameters(experts)
        exact = by_one_process(*(torch.cat(each) for each in zip(*every, strict=True)), first, second)
        found = there_and_back(build(kind, groups, experts), *every[place], *sharded(groups, first, second))
        tokens = [len(each[0]) for each in every]
        of_tokens = [each.split(tokens)[place] for each in exact[:3]]
        for label, a, b in zip(
            ("result", "x", "weights", "first", "second"),
            found,
            [*of_tokens, *sharded(groups, *exact[3:])],
            strict=False,
        ):
            assert a.equal(b), f"{name}: {label}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_process(layout):
    size, ep, etp = LAYOUTS[layout]
    pool.run(size, compare, ep, etp, "AllToAll", list(ROUTINGS))
    pool.run(size, compare, ep, etp, "AllGather", EVEN)
    if size == 1:
        pool.run(size, compare, ep, etp, "Local", list(ROUTINGS))


def counted(calls):
    return [(call.op, call.group, call.nbytes) for call in calls]


def calls_of(rank, size, ep, etp, kind):
    """(calls of forward and backward, of those with a plan, sizes) of each routing"""
    groups, found = pool.groups(ep=ep, etp=etp, experts=True), []
    for name in ROUTINGS if kind == "AllToAll" else EVEN:
        experts, k = ROUTINGS[name][1:3]
        x, indices, weights, grad = data(groups.etp_ep.rank, size, name)
        dispatcher, (first, second) = build(kind, groups, experts), sharded(groups, *parameters(experts))
        leaves = [x.requires_grad_(), weights.requires_grad_()]
        with groups.heartbeat.record() as forward:
            dispatched = dispatcher.start(x, indices, weights).finish()
            out = dispatcher.combine(run_experts(dispatched, first, second), dispatched)
        with groups.heartbeat.record() as backward:
            torch.autograd.grad(out, leaves, grad)
        with groups.heartbeat.record() as again:
            second_run = dispatcher.start(x, indices, weights, dispatched.plan).finish()
        for a, b in zip(second_run[:2], dispatched[:2], strict=True):
            assert a.equal(b)
        assert second_run.assignments.rows.equal(dispatched.assignments.rows)
        local = experts // ep
        owners = [{int(each) // local for each in row if each >= 0} for row in indices]
        mine = groups.ep.rank
        plan = dispatched.plan
        sizes = ExchangeSizes(
            experts=experts,
            ep=ep,
            etp=etp,
            tokens=len(x),
            topk=k,
            sent_rows=etp * sum(map(len, owners)),
            assignments=int((indices >= 0).sum()),
            received_rows=len(dispatched.rows),
            received_assignments=sum(dispatched.assignments.sizes),
            row=HIDDEN * 4,
        )
        # Rows for other ranks, as they are sent, with a copy per expert, and gathered.
        sent = sum(plan.send_rows) - plan.send_rows[groups.etp_ep.rank] if kind == "AllToAll" else 0
        plain = sum(etp - (int(each) // local == mine) for each in indices.flatten() if each >= 0)
        assert sent <= plain and sent <= len(x) * (size - 1)
        found.append((counted(forward), counted(backward), counted(again), sizes))
    return found


@pytest.mark.parametrize("layout", ["ep 1", "ep 2", "etp 2", "ep 4", "ep 2 etp 2"])
@pytest.mark.parametrize("kind", ["AllToAll", "AllGather"])
def test_calls(kind, layout):
    """Counts, assignments, rows and results; with a plan no counts; without other ranks nothing."""
    size, ep, etp = LAYOUTS[layout]
    of_sizes = exchange_collectives if kind == "AllToAll" else gathered_exchange_collectives
    for found in pool.run(size, calls_of, ep, etp, kind):
        for forward, backward, again, sizes in found:
            expected = of_sizes(sizes)
            assert forward == counted(expected.forward)
            assert backward == counted(expected.backward)
            assert again == counted(expected.forward[1:-1])


def twice(rank, size, ep, etp, dtype, mode):
    """The bits of results and gradients, of numbers whose sums depend on their order; and of a second time."""
    groups = pool.groups(ep=ep, etp=etp, experts=True)
    generator = torch.Generator().manual_seed(rank)
    x, grad, first, second = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((9, HIDDEN), (9, HIDDEN), (8 // ep, WIDTH, HIDDEN), (8 // ep, HIDDEN, WIDTH))
    )
    indices = torch.rand(9, 8, generator=generator).topk(3).indices
    weights = torch.rand(9, 3, generator=generator)

    def once():
        def experts(dispatched):
            rows, weights, assignments = dispatched[:3]
            return run_experts((rows.float(), weights, assignments), first.float(), second.float()).to(dtype)

        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        dispatcher = AllToAll(groups.etp_ep, 8, etp)
        dispatched = dispatcher.start(leaves[0], indices, leaves[1]).finish()
        out = dispatcher.combine(experts(dispatched), dispatched)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = once()
    with adversary(mode, seed=rank) if mode else contextlib.nullcontext():
        again = once()
    assert [each.dtype for each in found] == [dtype, dtype, torch.float32]
    return all(a.equal(b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("mode", [None, LATE, SHUFFLED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twice_the_same_bits(dtype, mode):
    assert all(pool.run(4, twice, 2, 2, dtype, mode))
    if mode is None:
        assert all(pool.run(2, twice, 2, 1, dtype, mode))


def rounded(rank, size):
    """1 + 2^-9 + 2^-9 + 2^-9 in bf16 from four ranks: 1.0 if each sum is rounded."""
    group = pool.groups(ep=4, etp=1, experts=True).etp_ep
    dispatcher = AllToAll(group, 4)
    indices = torch.tensor([[0, 1, 2, 3]])
    dispatched = dispatcher.start(torch.ones(1, 1, dtype=torch.bfloat16), indices, torch.ones(1, 4)).finish()
    small = torch.full_like(dispatched.rows, 1.0 if rank == 0 else 2.0**-9)
    return dispatcher.combine(small, dispatched).item()


def test_half_precision_is_rounded_once():
    assert pool.run(4, rounded) == [1.0078125] * 4


def kept(rank, size):
    """What the graph holds of an exchange."""
    groups, packed = pool.groups(ep=2, etp=1, experts=True), []
    x, indices, weights, _ = data(rank, size, "random")
    dispatcher = AllToAll(groups.etp_ep, 8)
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda nothing: nothing):
        dispatched = dispatcher.start(x.requires_grad_(), indices, weights.requires_grad_()).finish()
        out = dispatcher.combine(dispatched.rows, dispatched)
    combine, receive = vars(out.grad_fn), vars(dispatched.rows.grad_fn)
    exchange = receive["exchange"]
    assert exchange.sent == exchange.gradients == (None, None)
    fields = [value for owner in (combine, vars(exchange), vars(dispatched.plan)) for value in owner.values()]
    tensors = [field for field in fields if isinstance(field, torch.Tensor)]
    assert all(not tensor.is_floating_point() for tensor in tensors)
    return len(packed), len(tensors), sorted(combine), sorted(receive)


def test_only_indices_are_kept():
    tensors = 6  # of the plan, which is one object
    assert pool.run(2, kept) == [(0, tensors, ["plan", "route"], ["exchange"])] * 2


def order_of_shared(rank, size):
    """What a layer with shared experts does while tokens are on their way, forward and backward."""
    log = []
    groups = pool.groups(ep=2, etp=1, experts=True)
    fields = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16}
    build = dataclasses.replace(make_build(fields, groups), yield_turn=lambda: log.append("wait"))
    layer = MoELayer(build, build.spec.layers[0].mlp, 0, frozenset())
    initialize(local_parameters(layer), 3)
    layer.shared_experts.register_forward_hook(lambda *_: log.append("shared"))
    layer.shared_experts.linear_fc1.register_full_backward_hook(lambda *_: log.append("shared"))
    out = layer(torch.randn(4, 2, fields["hidden_size"], requires_grad=True))
    forward = list(log)
    log.clear()
    out.sum().backward()
    return forward, log


def test_shared_experts_are_computed_while_tokens_are_on_their_way():
    """Twice in each direction a message is waited for: tokens and results, and the gradients of both."""
    assert pool.run(2, order_of_shared) == [(["shared", "wait", "wait"], ["wait", "shared", "wait"])] * 2


def scattered(rank, size, tp, ep, tokens):
    """Tokens that are the same on all ranks of tp, and differ over dp."""
    groups = pool.groups(tp=tp, ep=ep, etp=1, experts=True)
    replica = groups.dp.rank
    generator = torch.Generator().manual_seed(replica)
    indices = torch.rand(tokens, 4, generator=generator).topk(2).indices
    x, weights = whole((tokens, HIDDEN), 10 + replica), whole((tokens, 2), 30 + replica)
    first, second = parameters(4)
    inner = Local(4) if ep == 1 else AllToAll(groups.etp_ep, 4)
    dispatcher = Scattered(inner, groups.tp)
    dispatched = dispatcher.start(x, indices, weights).finish()
    out = dispatcher.combine(run_experts(dispatched, *sharded(groups, first, second)), dispatched)
    assert out.equal(by_one_process(x, indices, weights, x, first, second)[0])
    with pytest.raises(AssertionError, match="no backward"):
        dispatcher.start(x.requires_grad_(), indices, weights).finish()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_tokens_of_all_ranks_of_tp(tokens):
    pool.run(2, scattered, 2, 1, tokens)
    pool.run(2, scattered, 2, 2, tokens)
    pool.run(4, scattered, 2, 4, tokens)
    pool.run(4, scattered, 4, 2, tokens)
