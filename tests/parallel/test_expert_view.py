"""Parameters that are sharded over etp, beside dense ones, where etp differs from tp.

Their copies are the ranks of edp. So they have buckets of their own, whose gradients are summed, sharded, counted and
saved over other ranks than those of dense parameters. The same small model is trained by one process and by many.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.base.mesh import DENSE, EXPERT
from megatron.core.comm.regions import sum_partial_to_sequence_shard, to_shards
from megatron.core.dist_checkpointing.store import load, save
from megatron.core.parameter import initialize, local_parameters, make_parameter
from megatron.spec.parameter import SEQUENCE, Init, ParamSpec, Shard
from megatron.training.checkpoint_tensors import model_tensors, optimizer_tensors
from tests import pool
from tests.parallel.strategies import FEW, STRATEGIES, boxes_of, whole
from tests.unit.models.builds import (
    CPU,
    assemble,
    assert_gradients,
    differentiate,
    make_data_parallel,
    make_optimizer,
    pieces,
)

TOKENS, HIDDEN, WIDTH, STEPS = 48, 16, 24, 3
# (processes, sizes): etp below tp, above it, and so large that an expert parameter has no copy while dense ones have.
LAYOUTS = {
    "tp 2, etp 1": (2, {"tp": 2, "etp": 1}),
    "tp 1, etp 2": (2, {"tp": 1, "etp": 2}),
    "tp 2, etp 1, dp 2": (4, {"tp": 2, "etp": 1}),
    "tp 1, etp 2, dp 4": (4, {"tp": 1, "etp": 2}),
    "tp 2, etp 4, dp 2": (4, {"tp": 2, "etp": 4}),
    "tp 4, etp 2": (4, {"tp": 4, "etp": 2}),
}
each_layout = pytest.mark.parametrize(("size", "sizes"), LAYOUTS.values(), ids=LAYOUTS)


class Layer(nn.Module):
    """[n, h] -> [n, h], with other tokens on every rank: y = z + D2 gelu(D1 z), z = x + E2 gelu(E1 (g * x)).

    The E are sharded over etp and the D over tp; each product gathers the tokens of its own group. g is on every rank.
    """

    def __init__(self, groups):
        super().__init__()
        normal, one = Init("normal", 0.3), Init("constant", 1.0)
        self.gain = self.make(groups, (HIDDEN,), one, decay=False, input_sharding=SEQUENCE)
        for name, axis in (("expert", "etp"), ("dense", "tp")):
            self.register_parameter(f"{name}_up", self.make(groups, (WIDTH, HIDDEN), normal, (Shard(axis, 0),)))
            self.register_parameter(f"{name}_down", self.make(groups, (HIDDEN, WIDTH), normal, (Shard(axis, 1),)))
        self.idle = self.make(groups, (WIDTH, 3), normal, (Shard("etp", 0),))  # gets no gradient
        self.groups = groups

    def make(self, groups, shape, init, shards=(), **fields):
        spec = ParamSpec(shape, init, shards, **fields)
        return make_parameter(spec, groups, sequence_parallel=True, dtype=torch.float32, device=CPU)

    def forward(self, x):
        x = x + self.product(self.gain * x, self.expert_up, self.expert_down, self.groups.etp)
        return x + self.product(x, self.dense_up, self.dense_down, self.groups.tp)

    def product(self, x, up, down, group):
        inner = F.gelu(to_shards(x, group, True) @ up.t())
        return sum_partial_to_sequence_shard(inner @ down.t(), group)


def build(groups, strategy):
    model = Layer(groups)
    initialize(local_parameters(model), seed=3)
    data_parallel = make_data_parallel(model, groups, bucket_size=200, **STRATEGIES[strategy])
    return model, data_parallel, make_optimizer(data_parallel, groups, clip_grad=0.5)


def step(model, data_parallel, optimizer, number):
    """(gradient pieces, norm, zeros) of a step on this rank's part of the tokens."""
    groups = model.groups
    x, target = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number)).chunk(
        groups.world.size, dim=1
    )[groups.world.rank]
    data_parallel.begin_step(1)
    differentiate(data_parallel, (model(x) - target).square().sum() / TOKENS, last=True)
    data_parallel.finish_reduction()
    gradients = pieces(data_parallel)
    update = optimizer.step(1e-2, 0.1, count_zeros=True)
    return gradients, float(update.grad_norm), int(update.num_zeros)


def groups_of(sizes, strategy):
    return pool.groups(**sizes, instances=None if "shards" not in STRATEGIES[strategy] else 1)


def train(rank, size, sizes, strategy):
    """(pieces of the first gradient, [norm], [zeros], pieces of the weights after three steps)."""
    parts = build(groups_of(sizes, strategy), strategy)
    gradients, norms, zeros = zip(*[step(*parts, number) for number in range(STEPS)], strict=True)
    parts[1].synchronize()
    return gradients[0], norms, zeros, boxes_of(parts[1])


@each_layout
@pytest.mark.parametrize("strategy", [pytest.param(s, marks=[] if s in FEW else pytest.mark.slow) for s in STRATEGIES])
def test_one_process_against_many(size, sizes, strategy):
    (alone,) = pool.run(1, train, {}, "plain")
    ranks = pool.run(size, train, sizes, strategy)
    assert_gradients(assemble([rank[0] for rank in ranks]), assemble([alone[0]]))
    for _, norms, zeros, _ in ranks:
        assert norms == pytest.approx(alone[1], rel=1e-6) and min(norms) > 0.5, "clipped"
        assert zeros == alone[2] == (3 * WIDTH,) * STEPS
    found, expected = whole([rank[3] for rank in ranks]), whole([alone[3]])
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def reductions(rank, size, sizes):
    """(axis of a bucket's parameters, ranks that reduce it)."""
    model, data_parallel, optimizer = build(groups_of(sizes, "optim"), "optim")
    buckets = [
        ({p.info.spec.axis for p in bucket.parameters.values()}, bucket.view.name, bucket.shards)
        for bucket in data_parallel.buckets
    ]
    with model.groups.heartbeat.record() as calls:
        step(model, data_parallel, optimizer, 0)
    return buckets, {
        call.group for call in calls if call.op in ("reduce_scatter", "all_gather") and "shard" in call.group
    }


def test_each_view_has_its_own_buckets():
    """At tp 2 x dp 2 a dense parameter has two copies and an expert one four; at etp 2 both have two, and share
    buckets."""
    for buckets, groups in pool.run(4, reductions, {"tp": 2, "etp": 1}):
        assert {view for _, view, _ in buckets} == {DENSE, EXPERT} and groups == {"shard", "expert_shard"}
        for axes, view, shards in buckets:
            assert axes == {"etp"} if view == EXPERT else axes <= {"tp", None}
            assert shards == (4 if view == EXPERT else 2)
    for buckets, groups in pool.run(4, reductions, {"tp": 2, "etp": 2}):
        assert {(view, shards) for _, view, shards in buckets} == {(DENSE, 2)} and groups == {"shard"}


def saved(rank, size, sizes, path):
    """Two steps, saved, and a third: (its norm, weights)."""
    model, data_parallel, optimizer = build(groups_of(sizes, "optim"), "optim")
    for number in range(2):
        step(model, data_parallel, optimizer, number)
    known, groups = local_parameters(model), model.groups
    tensors = model_tensors(known, groups) + optimizer_tensors(optimizer.pieces(), known, groups)
    save(path, 2, tensors, {}, group=groups.world, keep=None)
    return step(model, data_parallel, optimizer, 2)[1], boxes_of(data_parallel)


def resumed(rank, size, sizes, path):
    """The third step after loading."""
    model, data_parallel, optimizer = build(groups_of(sizes, "optim"), "optim")
    known, groups = local_parameters(model), model.groups
    state = list(optimizer.pieces())
    load(path, model_tensors(known, groups) + optimizer_tensors(state, known, groups), group=groups.world)
    optimizer.load(state)
    optimizer.steps = 2
    return step(model, data_parallel, optimizer, 2)[1], boxes_of(data_parallel)


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", ["tp 1, etp 2", "tp 2, etp 1, dp 2"])
def test_a_checkpoint_of_one_layout_loads_under_another(there, here, tmp_path):
    """Every element is written once, and the third step is that of the run that was not interrupted."""
    size, sizes = LAYOUTS[there]
    before = pool.run(size, saved, sizes, tmp_path)
    size, sizes = LAYOUTS[here]
    after = pool.run(size, resumed, sizes, tmp_path / "iter_0000002")
    assert after[0][0] == pytest.approx(before[0][0], rel=1e-6)
    found, expected = whole([rank[1] for rank in after]), whole([rank[1] for rank in before])
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
