"""Main gradients in bf16: every sum is rounded at random, right on average and the same in every layout."""

import pytest
import torch

from megatron.config.data_parallel import EVERY
from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.parameter import GradSlot
from tests import pool
from tests.parallel.strategies import FEW, STRATEGIES, make_run
from tests.unit.models.builds import LLAMA, accumulate, assemble, make_data_parallel, make_ids, make_model

LOW = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
STEP = 2.0**-7  # the distance of a number in bf16 to the next one is at most this part of it
BF16 = {**LLAMA, "bf16": True}
EXPERTS = {
    **LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
}  # fmt: skip


def gradients_of(fields, batches, groups=None, **settings):
    """[(name, offset, elements)] of this rank's reduced gradients, and the bytes of all."""
    groups = groups or pool.groups()
    model = make_model(fields, groups, spread=0.1)
    data_parallel = make_data_parallel(model, groups, **settings)
    accumulate(model, data_parallel, batches)
    found = [(name, offset, grad.float().numpy().copy()) for name, offset, grad in data_parallel.gradients()]
    return found, data_parallel.gradient_bytes()


def close_to(found, expected, rel):
    """Whether each gradient differs from the expected one by at most this part of its largest element."""
    assert found.keys() == expected.keys() and found
    for name, grad in found.items():
        assert (grad - expected[name]).abs().max() <= rel * expected[name].abs().max(), name


def named(pieces):
    return {(name, offset): torch.from_numpy(elements) for name, offset, elements in pieces}


@pytest.mark.parametrize("fields", [LLAMA, BF16, EXPERTS], ids=["fp32", "bf16", "experts"])
def test_one_sum_is_the_neighbour_of_the_fp32_one(fields):
    """Of linear layers, the embedding, norms, experts and their router: the memory is half, and every element is one of
    the two numbers next to the exact one."""
    batch = [make_ids(2, 8)]
    exact, nbytes = gradients_of(fields, batch)
    low, half = gradients_of(fields, batch, grads_in_bf16=True)
    assert half * 2 == nbytes
    exact, low = named(exact), named(low)
    for name, grad in exact.items():
        assert low[name].bfloat16().float().equal(low[name]), name
        assert ((low[name] - grad).abs() <= STEP * grad.abs()).all(), name
    assert any(not low[name].equal(grad.bfloat16().float()) for name, grad in exact.items()), "not all to nearest"


def test_many_small_sums_are_right_on_average():
    """What rounding to nearest would lose: 256 + 0.1 is 256 again."""
    run = make_run({"grads_in_bf16": True}, **LOW)
    bucket = run.data_parallel.buckets[0]
    name, parameter = max(bucket.parameters.items(), key=lambda item: item[1].numel())
    slot, count = parameter.slot, 2000
    assert isinstance(slot, GradSlot) and slot.main_grad.dtype == torch.bfloat16
    run.data_parallel.begin_step(1)
    slot.add(torch.full(parameter.shape, 256.0))
    nearest = slot.main_grad.clone()
    for _ in range(count):
        slot.add(torch.full(parameter.shape, 0.1))
        nearest = (nearest.float() + 0.1).bfloat16()
    assert (nearest == 256.0).all(), name
    mean, expected = float(slot.main_grad.float().mean()), 256.0 + 0.1 * count
    # Each sum adds at most a quarter of the square of bf16's step there, 2, to the variance of an element.
    deviation = (count * 0.1 * 2.0) ** 0.5 / parameter.numel() ** 0.5
    assert abs(mean - expected) < 5 * deviation
    assert slot.main_grad.unique().numel() > 10, "elements are rounded apart from each other"


def test_nan_and_infinity_stay():
    """Also the NaN of all bits, which is that of CUDA."""
    run = make_run({"grads_in_bf16": True}, **LOW)
    parameter = next(iter(run.data_parallel.buckets[0].parameters.values()))
    grad = torch.zeros(parameter.numel())
    grad[:4] = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    for _ in range(20):
        parameter.slot.fresh = True
        parameter.slot.add(grad.view(parameter.shape))
        memory = parameter.slot.main_grad.flatten()
        assert memory[:2].isnan().all() and memory[2] == float("inf") and memory[3] == -float("inf")
        assert not memory[4:].any()


def test_a_step_draws_its_own_bits():
    """The same in a run that goes on, others in another step, for another microbatch and on another copy."""
    run = make_run({"grads_in_bf16": True}, **LOW)
    parameter = max(run.data_parallel.buckets[0].parameters.values(), key=lambda p: p.numel())

    def rounded(iteration, times=1):
        run.data_parallel.begin_step(1, iteration)
        for _ in range(times):
            parameter.slot.fresh = True
            parameter.slot.add(torch.full(parameter.shape, 1.0 + STEP / 3))
        return parameter.slot.main_grad.clone()

    first = rounded(3)
    assert rounded(3).equal(first) and not rounded(4).equal(first) and not rounded(3, times=2).equal(first)


def reduced(rank, size, tp, strategy):
    settings = {**STRATEGIES[strategy], "grads_in_bf16": True}
    groups = pool.groups(tp=tp, instances=None if settings.get("shards", "no_shard") == "no_shard" else 1)
    ids = make_ids(8, 8).chunk(groups.dp.size)[groups.dp.rank]
    model = make_model(LLAMA, groups, spread=0.1)
    data_parallel = make_data_parallel(model, groups, **settings)
    accumulate(model, data_parallel, list(ids.chunk(2)))
    return [
        (name, offset, parameter_shape(data_parallel, name), grad.float().numpy().copy())
        for name, offset, grad in data_parallel.gradients()
    ]


def parameter_shape(data_parallel, name):
    (found,) = (bucket.parameters[name] for bucket in data_parallel.buckets if name in bucket.parameters)
    return found.info.spec.shape


@pytest.mark.parametrize(("size", "tp", "strategy"), [(2, 2, "plain"), *((2, 1, name) for name in FEW)])
def test_layouts_agree(size, tp, strategy):
    """Up to the roundings of two microbatches and of the sum over ranks, each of at most a step of bf16."""
    ranks = pool.run(size, reduced, tp, strategy)
    exact, _ = gradients_of(LLAMA, [make_ids(8, 8)])
    expected = {name: grad for (name, _), grad in named(exact).items()}
    close_to(assemble(ranks, rtol=0.0, atol=0.0), expected, 3 * STEP)


def test_a_shard_adds_up_without_loss():
    """Gradients that are reduced after every microbatch are fp32 until then, and their sum is rounded at random."""
    run = make_run({"grads_in_bf16": True}, **LOW)
    bucket = run.data_parallel.buckets[0]
    bucket.keep_grads(False)
    bucket.clear()
    block = torch.full((bucket.size,), 256.0)
    bucket.accumulate(block.clone())
    for _ in range(500):
        bucket.accumulate(torch.full_like(block, 0.1))
    assert bucket.grad_shard.dtype == torch.bfloat16
    placed = torch.cat([bucket.grad_shard[p.at : p.at + p.stop - p.start] for p in bucket.pieces]).float()
    deviation = (500 * 0.1 * 2.0) ** 0.5 / placed.numel() ** 0.5
    assert abs(float(placed.mean()) - 306.0) < 5 * deviation


def test_the_run_learns_as_the_one_in_fp32():
    """Within 1 % of its loss after 40 steps of three microbatches; and fewer bytes of gradients."""
    losses, norms = make_run({}, fields=BF16).steps(40, accumulation=3)
    run = make_run({"grads_in_bf16": True}, fields=BF16, **LOW)
    low, low_norms = run.steps(40, accumulation=3)
    assert losses[-1] < 0.8 * losses[0]
    assert low != losses and low[-3:] == pytest.approx(losses[-3:], rel=0.01)
    assert low_norms[:3] == pytest.approx(norms[:3], rel=0.01)


def test_the_place_of_the_states_changes_nothing():
    """Updated on the device in chunks, by the CPU and from host memory: the same bits."""
    expected = make_run({"grads_in_bf16": True}, fields=BF16, **LOW).steps(6, accumulation=2)
    for offload in (
        OffloadSettings(chunk_size=1280),
        OffloadSettings(mode=UPDATE, fraction=0.6, overlap=True, chunk_size=1280),
        OffloadSettings(mode=UPDATE, fraction=1.0, chunk_size=4096),
        OffloadSettings(mode=STATES, fraction=1.0, chunk_size=1280),
    ):
        assert (
            make_run({"grads_in_bf16": True}, fields=BF16, offload=offload, **LOW).steps(6, accumulation=2) == expected
        )


def test_every_microbatch_takes_fp32_blocks():
    run = make_run({**STRATEGIES["grads"], "grads_in_bf16": True}, **LOW)
    assert STRATEGIES["grads"]["mode"] == EVERY
    losses, _ = run.steps(3, accumulation=2)
    exact, _ = make_run(STRATEGIES["grads"]).steps(3, accumulation=2)
    assert losses == pytest.approx(exact, rel=1e-3)
