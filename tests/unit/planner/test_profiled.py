"""Times from a made-up profile: measured layers as they are, messages between their sizes, and parts that add up."""

import dataclasses

import pytest

from megatron.base.errors import ConfigError
from megatron.config.mesh import mesh_of
from megatron.config.recompute import BLOCK, FULL, SELECTIVE, RecomputeConfig
from megatron.config.settings import resolve
from megatron.planner.time.hardware import Place
from megatron.planner.time.operations import Gemm
from megatron.planner.time.profile_file import SEND, MessageRow
from megatron.planner.time.profile_tables import MessageTable
from megatron.planner.time.profiled import ProfiledClock, cluster_of
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel, clocked_seconds
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, SHIFT
from tests.unit.planner.profiles import (
    AGAIN,
    BANDWIDTH,
    EMBED,
    INTERFERENCE,
    LATENCY,
    LAYER,
    LOSS,
    MODEL,
    RATE,
    STEP,
    UPDATES,
    layer_row,
    message_rows,
    profile_of,
    run_of,
)

LAYOUTS = {
    "one": (1, {}),
    "dp": (2, {}),
    "zero1": (2, {"use_distributed_optimizer": True}),
    "zero1 overlapped": (
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "zero3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp overlapped": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}),
    "cp": (2, {"context_parallel_size": 2}),
    "pp": (2, {"pipeline_model_parallel_size": 2}),
    "zb": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
    "tp pp": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def timed(run, world_size=1, profile=None):
    profile = profile or profile_of()
    model = StepModel(run, resolve(run, mesh_of(run.parallel, world_size)), cluster_of(profile), Software())
    return model, ProfiledClock(profile, run, Software(), "machine.json")


def time_of(run, world_size=1, profile=None):
    model, clock = timed(run, world_size, profile)
    return model.time(clock)


def test_on_one_device_a_step_is_made_of_the_profile_s_own_times():
    run = run_of(samples=4)
    model, _ = timed(run)
    parameters = sum(held.all for held in model.replicas.held)
    expected = 4 * (4 * sum(LAYER) + sum(EMBED) + sum(LOSS)) + parameters / UPDATES + STEP
    assert time_of(run).seconds == pytest.approx(expected, rel=1e-12)


def test_a_layer_has_the_measured_phases():
    model, clock = timed(run_of(samples=4))
    phases = model.layer(clock, 3)
    found = [phases.forward.total, phases.input_grad.total, phases.weight_grad.total]
    assert found == pytest.approx(LAYER, rel=1e-12)


@pytest.mark.parametrize(
    ("recompute", "added"),
    [
        (RecomputeConfig(recompute_granularity=SELECTIVE), AGAIN["core_attn"]),
        (RecomputeConfig(recompute_granularity=SELECTIVE, recompute_modules=("norm",)), AGAIN["norm"]),
        (
            RecomputeConfig(recompute_granularity=SELECTIVE, recompute_modules=("norm", "mlp_act")),
            AGAIN["norm"] + AGAIN["mlp_act"],
        ),
        (
            RecomputeConfig(recompute_granularity=SELECTIVE, recompute_modules=("core_attn", "mlp")),
            AGAIN["core_attn"] + AGAIN["mlp"],
        ),
        (
            RecomputeConfig(recompute_granularity=FULL, recompute_method=BLOCK, recompute_num_layers=1),
            AGAIN["full"] / 4,
        ),
    ],
)
def test_recompute_adds_what_was_measured(recompute, added):
    """Of four layers and one microbatch; block recompute of one layer is that of a quarter of them."""
    plain, again = time_of(run_of(samples=1)), time_of(run_of(samples=1, recompute=recompute))
    assert again.seconds - plain.seconds == pytest.approx(4 * added, rel=1e-9)
    assert again.parts["recompute"] == pytest.approx(4 * added, rel=1e-9)


def test_a_layer_between_measured_ones_takes_the_nearest_and_the_tables():
    """A micro batch of 4 has twice the operations of 2, whose layer was measured at twice LAYER; all tables are
    linear."""
    model, clock = timed(run_of(micro_batch=4))
    assert model.layer(clock, 0).forward.total == pytest.approx(4 * LAYER[0], rel=1e-6)


def test_measured_products_are_exact_and_others_at_the_rate_of_similar_ones():
    _, clock = timed(run_of())
    assert clock.computation(Gemm("qkv", 128, 768, 256)) == pytest.approx(2 * 128 * 768 * 256 / RATE, rel=1e-12)
    assert clock.computation(Gemm("other", 512, 512, 512)) == pytest.approx(2 * 512**3 / RATE, rel=1e-9)
    assert clock.computation(Gemm("three", 128, 768, 256, count=3)) == pytest.approx(6 * 128 * 768 * 256 / RATE)


@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 16, 300_000, 1 << 20, 1 << 26])
def test_messages_are_on_the_line_between_measured_sizes_and_beyond(nbytes):
    _, clock = timed(run_of())
    inside, outside = Place(2, 2), Place(2, 1)
    assert clock.collective(inside, ALL_GATHER, nbytes) == pytest.approx(LATENCY + nbytes / BANDWIDTH)
    assert clock.collective(outside, ALL_GATHER, nbytes) == pytest.approx(LATENCY + 10 * nbytes / BANDWIDTH)
    assert clock.bucket(outside, ALL_REDUCE, nbytes) == pytest.approx(LATENCY + 10 * nbytes / BANDWIDTH)
    assert clock.hop(Place(8, 1), nbytes) == pytest.approx(LATENCY + 10 * nbytes / BANDWIDTH)


def test_a_small_message_takes_as_long_as_the_smallest_that_was_measured():
    _, clock = timed(run_of())
    assert clock.collective(Place(2, 2), ALL_GATHER, 1) == LATENCY + (1 << 12) / BANDWIDTH
    assert clock.collective(Place(1, 1), ALL_GATHER, 1 << 20) == 0.0


def test_a_group_that_was_not_measured_sends_its_share():
    """A rank of n sends (n - 1) / n of a tensor: 7/8 instead of the 3/4 of the group of four."""
    _, clock = timed(run_of())
    four, eight = (clock.collective(Place(n, n), ALL_GATHER, 1 << 20) for n in (4, 8))
    assert eight == pytest.approx(four * (7 / 8) / (3 / 4))


def test_messages_between_nodes_that_were_not_measured_are_refused():
    inside = tuple(row for row in message_rows() if row.ranks == row.together)
    _, clock = timed(run_of(), profile=profile_of(messages=inside))
    with pytest.raises(ConfigError, match=f"machine.json holds no {SEND} between nodes"):
        clock.hop(Place(4, 1), 1000)


def test_interference_is_that_of_the_message():
    rows = [
        dataclasses.replace(row, interference=0.75) if (row.op, row.together) == (SHIFT, 1) else row
        for row in message_rows()
    ]
    _, clock = timed(run_of(), profile=profile_of(messages=tuple(rows)))
    assert clock.slowing(2.0, Place(2, 1), SHIFT) == 1.5
    assert clock.slowing(2.0, Place(2, 2), SHIFT) == 2 * INTERFERENCE


def test_a_long_message_costs_computation_its_bytes_and_not_its_waiting():
    short, long = (
        MessageRow(op=SHIFT, ranks=2, together=1, nbytes=n, seconds=t, interference=part, spread=0.0)
        for n, t, part in ((1000, 0.01, 1.0), (100_000, 0.11, 0.2))
    )
    table = MessageTable([short, long], "machine.json")
    lost = [table.slowing(SHIFT, Place(2, 1), seconds) for seconds in (0.0, 0.005, 0.01, 0.06, 0.11, 0.21)]
    assert lost == pytest.approx([0.0, 0.005, 0.01, 0.016, 0.022, 0.034])


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_add_up_to_the_step_and_all_ways_give_the_same_number(name):
    world_size, parallel = LAYOUTS[name]
    model, clock = timed(run_of(samples=8, **parallel), world_size)
    time = model.time(clock)
    assert sum(time.parts.values()) == pytest.approx(time.seconds, rel=1e-12)
    assert clocked_seconds([model], [clock])[0] == pytest.approx(time.seconds, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in time.parts.values())


def test_a_host_that_queues_more_slowly_than_the_device_computes_decides():
    slow = layer_row(host_forward_seconds=10e-3, host_backward_seconds=20e-3)
    model, clock = timed(run_of(), profile=profile_of(layers=(slow,)))
    phases = model.layer(clock, 0)
    assert phases.forward.total == pytest.approx(10e-3)
    assert phases.input_grad.total + phases.weight_grad.total == pytest.approx(20e-3)


def test_sums_that_backward_hides_slow_it_down():
    world_size, parallel = LAYOUTS["zero1 overlapped"]
    run = run_of(samples=8, **parallel)
    quiet = profile_of(messages=tuple(dataclasses.replace(row, interference=0.0) for row in message_rows()))
    assert time_of(run, world_size).parts["interference"] > time_of(run, world_size, quiet).parts["interference"] == 0


def test_a_cluster_from_a_profile_has_its_nodes_and_device():
    cluster = cluster_of(profile_of())
    assert (cluster.device.name, cluster.node) == ("cpu", 2)
    assert cluster.device.flops("bf16") == pytest.approx(RATE)


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="hidden_size 256 and not 128"):
        timed(run_of(model=dataclasses.replace(MODEL, hidden_size=128)))


def test_a_stage_loses_time_to_the_messages_that_it_sends():
    model, clock = timed(run_of(pipeline_model_parallel_size=2), 2)
    first, last = model.stages(clock)
    hop = clock.hop(model.boundaries[0], model.work.sizes.residual)
    assert first.forward["interference"] == last.input_grad["interference"] == pytest.approx(INTERFERENCE * hop)
    assert "interference" not in {**first.input_grad, **last.forward}
