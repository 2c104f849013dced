"""What context parallelism sends, keeps and computes, and in which order, as its docstrings and docs say."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.context_parallel import ring
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.spec.attention import CoreSpec
from megatron.spec.collectives import context_collectives
from megatron.spec.sizes import Sizes
from tests import pool
from tests.parallel.context import SCORES, local_inputs, make, whole_inputs
from tests.unit.spec.planned import CPU

PLAIN = {"scores": SCORES, "segments": None, "window": None, "dropout": 0.0}
S, B, D = 48, 2, 8
GRID = [(kind, size) for size in (2, 3) for kind in ("p2p", "all_gather", "a2a")] + [("a2a+p2p", 4)]


def sent_bytes(calls, sizes):
    """What a rank sends in these calls; `sizes` of the groups by name."""
    share = {
        "shift": lambda n: 1,
        "all_gather": lambda n: n - 1,
        "reduce_scatter": lambda n: (n - 1) / n,
        "all_to_all": lambda n: (n - 1) / n,
    }
    return sum(share[call.op](sizes[call.group]) * call.nbytes for call in calls)


def formulas(kind, size, n, g, itemsize, v_dim=D):
    """(forward, backward) bytes a rank sends, from the docstrings."""
    tokens = S // size * B * itemsize
    queries, output, keys = tokens * n * D, tokens * n * v_dim, tokens * g * (D + v_dim)
    if kind in ("p2p", "all_gather"):
        return (size - 1) * keys, 2 * (size - 1) * keys
    inner = size if kind == "a2a" else 2
    keys = tokens * max(g, inner) * (D + v_dim)
    both = (inner - 1) / inner * (queries + output + keys)
    outer = size // inner
    return both + (outer - 1) * keys, both + 2 * (outer - 1) * keys


def measured(rank, size, kind, heads, dtype, v_dim=D):
    """(calls of the forward, of the backward)"""
    attend, cp = make(kind, size, attention_lse.cpu)
    leaves, grad = local_inputs(whole_inputs(S, *heads, b=B, d=D, v_dim=v_dim, dtype=dtype), cp)
    with cp.heartbeat.record() as forward:
        out = attend(*leaves, **PLAIN)
    with cp.heartbeat.record() as backward:
        out.backward(grad)
    return forward, backward


@pytest.mark.parametrize(("kind", "size"), GRID)
@pytest.mark.parametrize("heads", [(12, 12), (12, 6), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(kind, size, heads, dtype):
    sizes = {"cp": size, "cp_inner": 2, "cp_outer": size // 2}
    for calls in pool.run(size, measured, kind, heads, dtype):
        assert tuple(sent_bytes(c, sizes) for c in calls) == pytest.approx(formulas(kind, size, *heads, dtype.itemsize))


@pytest.mark.parametrize(("kind", "size"), [("p2p", 2), ("all_gather", 2), ("a2a", 2), ("a2a+p2p", 4)])
def test_bytes_of_values_of_fewer_channels_than_keys(kind, size):
    """They are those of the description of the layer, too."""
    sizes = {"cp": size, "cp_inner": 2, "cp_outer": size // 2}
    core = CoreSpec(12, 6, D, D // 2, None, 1.0, None, 0.0)
    sizes_of_rank = Sizes(target=CPU, s=S // size, b=B, h=96, e=4, r=4, cp=size, comm_type=kind, cp_inner=2)
    planned = context_collectives(core, sizes_of_rank)
    for calls in pool.run(size, measured, kind, (12, 6), torch.float32, D // 2):
        found = tuple(sent_bytes(part, sizes) for part in calls)
        assert found == pytest.approx(formulas(kind, size, 12, 6, 4, D // 2))
        assert found == pytest.approx(tuple(sent_bytes(part, sizes) for part in (planned.forward, planned.backward)))


@pytest.mark.parametrize(
    ("kind", "size", "forward", "backward"),
    [
        ("p2p", 3, ["shift"] * 2, ["shift"] * 4),
        ("all_gather", 3, ["all_gather"], ["all_gather", "reduce_scatter"]),
        ("a2a", 3, ["all_to_all"] * 2, ["all_to_all"] * 2),
        ("a2a+p2p", 4, ["all_to_all", "shift", "all_to_all"], ["all_to_all", "shift", "shift", "all_to_all"]),
    ],
)
def test_calls(kind, size, forward, backward):
    for calls in pool.run(size, measured, kind, (12, 12), torch.float32):
        assert [[call.op for call in part] for part in calls] == [forward, backward]


def events_of_a_ring(rank, size):
    """What is posted, computed and waited for, in order."""
    events, shift, cpu = [], ring.shift_async, attention_lse.cpu
    names = {ring._KEYS: "keys", ring._GRADIENTS: "gradients"}

    class Watched:
        def __init__(self, name, work):
            self.name, self.work = name, work

        def wait(self):
            events.append(f"wait {self.name}")
            self.work.wait()

    def watched_shift(tensor, group, tag):
        events.append(f"send {names[tag]}")
        received, handle = shift(tensor, group, tag)
        return received, handle._replace(work=Watched(names[tag], handle.work))

    def forward(*args):
        events.append("attend")
        return cpu.forward(*args)

    def backward(*args):
        events.append("attend")
        return cpu.backward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "shift_async", watched_shift)
        attend, cp = make("p2p", size, BlockKernel(forward, backward))
        leaves, grad = local_inputs(whole_inputs(S, 4, 2), cp)
        out = attend(*leaves, **PLAIN)
        in_forward = events.copy()
        events.clear()
        out.backward(grad)
    return in_forward, events


def test_what_comes_next_travels_while_a_block_is_attended():
    step = ["send keys", "attend", "wait keys"]
    # No gradient is older than the second step. The own keys come in two parts: first, and (two calls) at the end.
    backward = [*step, "send keys", "attend", "send gradients", "wait keys"]
    backward += ["attend", "wait gradients", "send gradients", "attend", "attend", "wait gradients"]
    assert pool.run(3, events_of_a_ring) == [([*step, *step, "attend"], backward)] * 3


def pairs_attended(rank, size, kind, options):
    """Query-key pairs that this rank's kernel was asked for and that are visible, a head of a sample: forward,
    backward."""
    counts = [0, 0]

    def count(which, q, k, rule):
        mask = rule.mask(len(q), len(k), q.device)
        counts[which] += len(q) * len(k) if mask is None else int(mask.sum())

    def forward(q, k, v, rule):
        count(0, q, k, rule)
        return attention_lse.cpu.forward(q, k, v, rule)

    def backward(grad, q, k, v, out, lse, rule):
        count(1, q, k, rule)
        return attention_lse.cpu.backward(grad, q, k, v, out, lse, rule)

    attend, cp = make(kind, size, BlockKernel(forward, backward))
    leaves, grad = local_inputs(whole_inputs(240, 2, 2), cp)
    attend(*leaves, **options).backward(grad)
    return counts


@pytest.mark.parametrize(
    ("kind", "size"), [("p2p", 3), ("p2p", 4), ("all_gather", 3), ("all_gather", 4), ("a2a+p2p", 4)]
)
@pytest.mark.parametrize("window", [None, 30])
def test_equal_work(kind, size, window):
    """And no more than causal attention needs: nobody computes what the mask would throw away."""
    found = pool.run(size, pairs_attended, kind, {**PLAIN, "window": window})
    needed = sum(min(i + 1, window or 240) for i in range(240))
    heads_apart = 2 if kind == "a2a+p2p" else 1  # so many neighbours attend the same pairs, of other heads
    for counts in zip(*found, strict=True):
        assert sum(counts) == needed * heads_apart
        if window is None:
            assert max(counts) <= 1.01 * min(counts)


def kept_bytes(rank, size, kind, options):
    """Bytes of distinct memory that the forward saved for the backward."""
    attend, cp = make(kind, size)
    leaves, _ = local_inputs(whole_inputs(S, 4, 2, b=B, d=D), cp)
    return saved_bytes(lambda: attend(*leaves, **options))


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_kept(kind, size):
    """q, the output, this rank's keys and values, and the log-sum-exp: nothing of other ranks, nothing of blocks."""
    tokens = S // size * B * 4
    expected = tokens * (4 * D + 4 * D + 2 * 2 * D + 4)
    assert pool.run(size, kept_bytes, kind, PLAIN) == [expected] * size


def early_gathers(rank, size, early):
    """(collectives before the call, in the backward when the gradient leaves the "MLP", and in all; results agree)"""
    attention, cp = make("all_gather", size)
    leaves, grad = local_inputs(whole_inputs(S, 4, 2, b=B, d=D), cp)
    plain = attention(*leaves, **PLAIN) * 2.0
    expected = [plain.detach(), *torch.autograd.grad(plain, leaves, grad)]
    seen = []
    with cp.heartbeat.record() as calls:
        q, k, v = leaves
        attention.prefetch(k, v)
        seen.append([call.op for call in calls])
        out = attention(q, k, v, **PLAIN)
        after_mlp = out * 2.0
        out.register_hook(lambda _: seen.append([call.op for call in calls]))
        if early:
            after_mlp = attention.gather_early(after_mlp)
        found = [after_mlp.detach(), *torch.autograd.grad(after_mlp, leaves, grad)]
        seen.append([call.op for call in calls])
    return seen, all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("early", [False, True])
def test_gathers_out_of_the_way(early):
    """The forward's starts in `prefetch`; the backward's, with `gather_early`, before the gradient of the layers
    between."""
    one, two = ["all_gather"], ["all_gather"] * 2
    assert pool.run(2, early_gathers, early) == [([one, two if early else one, [*two, "reduce_scatter"]], True)] * 2


def without_gradients(rank, size):
    """Nothing waits for a backward that does not come."""
    attention, cp = make("all_gather", size)
    (q, k, v), _ = local_inputs(whole_inputs(S, 4, 2, b=B, d=D), cp)
    with torch.no_grad():
        attention.prefetch(k, v)
        out = attention(q, k, v, **PLAIN)
        marked = attention.gather_early(out)
    k, v = k.detach(), v.detach()
    attention.prefetch(k, v)
    out = attention(q, k, v, **PLAIN)
    same = attention.gather_early(out) is out
    with cp.heartbeat.record() as calls:
        out.sum().backward()
    return marked.requires_grad, same, [call.op for call in calls]


def test_without_gradients():
    """Of keys that want none: gathered for the queries' gradient, but nothing is sent back."""
    assert pool.run(2, without_gradients) == [(False, True, ["all_gather"])] * 2


def recomputed(rank, size):
    """Gradients with the attention done again in the backward, and as usual."""
    attention, cp = make("all_gather", size)
    leaves, grad = local_inputs(whole_inputs(S, 4, 2, b=B, d=D), cp)

    def run(again):
        q, k, v = (x.clone() for x in leaves)  # leaves of the checkpoint have gradients of their own
        attention.prefetch(k, v)
        attend = functools.partial(attention, **PLAIN)
        out = checkpoint(attend, q, k, v, use_reentrant=False) if again else attend(q, k, v)
        return torch.autograd.grad(attention.gather_early(out * 2.0), leaves, grad)

    return all(a.equal(b) for a, b in zip(run(True), run(False), strict=True))


def test_recomputation():
    assert pool.run(2, recomputed) == [True, True]
