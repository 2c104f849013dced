"""AdamW in Triton's interpreter against torch's; run by tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.rules.adamw import AdamW
from megatron.core.optimizer.update_rule import Inputs, gate_of
from megatron.kernels.backends.triton.adam import BLOCK, OnePassAdamW
from megatron.kernels.ops.update_run import UpdateRun
from tests import pool
from tests.unit.kernels.close import random
from tests.unit.models.builds import CPU, LLAMA, accumulate, make_data_parallel, make_ids, make_model, make_optimizer

DECAYS, PLAIN, BOTH = (True, False), (False, False), (True, True)
CUTS = {  # (size of a run, its kind)
    "one": [(1, DECAYS)],
    "blocks": [(2 * BLOCK, DECAYS), (64, PLAIN), (BLOCK + 64, BOTH)],
    "odd": [(1000, DECAYS), (3, PLAIN), (37, BOTH), (9, (False, True))],
    "many": [(17, (number % 2 == 0, number % 3 == 0)) for number in range(40)],
    "none": [],
}


def runs_of(cut):
    """The runs, of which some elements in the middle are in none, and the number of elements."""
    runs, at = [], 0
    for size, kind in cut:
        runs.append(UpdateRun(at, at + size, *kind))
        at += size + 64 * (size == 64)
    return runs, at


def states(size):
    found = {"master": random(size), "exp_avg": random(size, seed=1), "exp_avg_sq": random(size, seed=2).square()}
    return found, random(size, seed=3)


def inputs_of(divisor, found_inf=False, step=3):
    gate = gate_of(torch.tensor(divisor, dtype=torch.float64), torch.tensor(found_inf))
    return Inputs(step, 0.02, 0.05, 0.1, gate)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("divisor", [1.0, 3.7])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_parity(name, divisor, beta1):
    """Over three steps, with runs of every kind; elements in no run stay."""
    (runs, size), config = runs_of(CUTS[name]), OptimizerConfig(adam_beta1=beta1)
    (ours, gradient), (theirs, _) = states(size), states(size)
    one_pass = OnePassAdamW(runs, CPU)
    for step in (1, 2, 1000):
        inputs = inputs_of(divisor, step=step)
        AdamW(config, runs, one_pass).step(ours, gradient, None, inputs)
        AdamW(config, runs).step(theirs, gradient.clone(), None, inputs)
    assert gradient.equal(states(size)[1])  # left alone
    for key, found in ours.items():
        torch.testing.assert_close(found, theirs[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("divisor", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("found_inf", [False, True])
def test_the_rounded_copy_is_written_with_and_without_an_update(dtype, divisor, found_inf):
    """Into memory that holds something else; without an update nothing else changes."""
    if divisor != 1.0 and not found_inf:
        return
    runs, size = runs_of(CUTS["odd"])
    values, gradient = states(size)
    out = torch.full((size,), 7.0, dtype=dtype)
    one_pass = OnePassAdamW(runs, CPU)
    AdamW(OptimizerConfig(), runs, one_pass).step(values, gradient, out, inputs_of(divisor, found_inf))
    assert out.equal(values["master"].to(dtype))
    unchanged = [values[key].equal(before) for key, before in states(size)[0].items()]
    assert unchanged == [found_inf] * 3


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"}],
    ids=["fp32 states", "bf16 states"],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_an_optimizer_updates_a_model_as_it_does_without(fields, bf16):
    """Several buckets, three steps with given gradients, of which the second is not finite."""
    groups, ids, found = pool.groups(), make_ids(2, 10), []
    for make_adamw in (None, OnePassAdamW):
        model = make_model({**LLAMA, "bf16": bf16}, groups, spread=0.1)
        data_parallel = make_data_parallel(model, groups)
        optimizer = make_optimizer(data_parallel, groups, make_adamw=make_adamw, clip_grad=0.5, **fields)
        for step in range(3):
            accumulate(model, data_parallel, [ids])
            for number, bucket in enumerate(data_parallel.buckets):
                bucket.grad_shard.copy_(random(bucket.size, seed=10 * number + step))
            if step == 1:
                data_parallel.buckets[0].grad_shard[5] = float("inf")
            applied = optimizer.step(0.01, 0.1, decoupled_lr=0.02).applied
            assert bool(applied) == (step != 1)
        assert {run.decay for chunks in optimizer.chunks for chunk in chunks for run in chunk.runs} == {True, False}
        masters = [chunk.master().clone() for chunks in optimizer.chunks for chunk in chunks]
        found.append((masters, [bucket.param_shard.clone() for bucket in data_parallel.buckets]))
    (masters, weights), (expected_masters, expected_weights) = found
    torch.testing.assert_close(masters, expected_masters, rtol=1e-6, atol=1e-6)
    # The interpreter cuts off bits where it casts to bf16, and rounds only to other dtypes.
    torch.testing.assert_close(weights, expected_weights, rtol=2**-7 if bf16 else 1e-6, atol=1e-6)
