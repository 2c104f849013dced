"""Dropout of attention probabilities where attention is done in blocks: the mask of one process, again in backward."""

import dataclasses

import pytest
import torch

from megatron.config.context_parallel import inner_size
from megatron.config.rules.check import check
from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_rule import Drop, draw_seed
from megatron.tooling.layout_parity import measure, reduced
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.context import error, joined, local_inputs, make, whole_inputs
from tests.unit.config.runs import make_run
from tests.unit.context_parallel import simulated
from tests.unit.models.builds import CPU


def with_seed(rank, size, kind, heads, s, seed):
    """This rank's [out, dq, dk, dv] with dropout, all ranks with one seed; twice, for as many seeds."""
    attend, cp = make(kind, size, attention_lse.with_dropout(attention_lse.cpu))
    leaves, grad = local_inputs(whole_inputs(s, *heads), cp)
    found = []
    for _ in range(2):
        torch.manual_seed(seed)
        out = attend(*leaves, scores=simulated.SCORES, segments=None, window=None, dropout=0.4)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return found


@pytest.mark.parametrize(("kind", "size"), [("p2p", 2), ("p2p", 3), ("all_gather", 2), ("a2a+p2p", 4)])
def test_dropout_in_blocks_is_that_of_one_process(kind, size):
    """With the factors that the seed gives to the places in the whole sequence."""
    heads, s, seed = (4, 4), 48, 9
    first, again = zip(*pool.run(size, with_seed, kind, heads, s, seed), strict=True)
    q, k, v, grad = whole_inputs(s, *heads)
    torch.manual_seed(seed)
    places, shares = torch.arange(s, dtype=torch.int32), 2 if kind == "a2a+p2p" else 1
    drop = Drop(0.4, draw_seed(0.4, q.device), places, places)
    factors = torch.cat(
        [drop.factors(q.shape[1], heads[0] // shares)] * shares, dim=1
    )  # neighbours share out the heads
    expected = simulated.exact(q, k, v, grad.view(q.shape), factors=factors)
    expected[0] = expected[0].flatten(2)
    for found, wanted in zip(joined(first), expected, strict=True):
        assert error(found, wanted) <= 1e-5
    for one, other in zip(first, again, strict=True):
        assert all(map(torch.equal, one, other))


RECOMPUTE = [
    {},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
]


def trained(rank, size, layout, dropout, recompute):
    """(losses of three steps, this rank's first gradients)"""
    run = reduced(make_run(position_embedding_type="rope"), 3)
    run = dataclasses.replace(run, recompute=make_run(**recompute).recompute)
    model = dataclasses.replace(run.model, hidden_size=32, kv_channels=2, ffn_hidden_size=32, attention_dropout=dropout)
    run = under(dataclasses.replace(run, model=model), layout)
    check(run, size)
    found = measure(run, pool.groups(cp=size, inner=inner_size(run.parallel)), CPU).as_arrays()
    return found.losses, found.pieces


@pytest.mark.parametrize("kind", ["p2p", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_what_is_computed_again_drops_the_same(kind):
    layout = ParityLayout(1, 1, cp=2, comm_type=kind)
    first, *others = (pool.run(2, trained, layout, 0.3, recompute) for recompute in RECOMPUTE)
    for other in others:
        for (losses, pieces), (expected, gradients) in zip(other, first, strict=True):
            assert losses == expected
            assert all((a[2] == b[2]).all() for a, b in zip(pieces, gradients, strict=True))
    without = pool.run(2, trained, layout, 0.0, {})
    assert first[0][0] != without[0][0] and first[0][0] == pytest.approx(without[0][0], rel=0.1)
