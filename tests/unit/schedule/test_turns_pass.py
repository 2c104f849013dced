"""Backwards that run together with forwards: which ones, and how long they take."""

import dataclasses

import pytest

from megatron.schedule.costs import Costs
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedule import (
    COMPUTE,
    GRADIENTS_OF_INPUT,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    round_robin,
)
from megatron.schedule.simulate import simulate
from megatron.schedule.validate import check, memory_in_flight

CHUNKS = {"interleaved": 2, "zb-v": 2}
NAMES = [name for name, spec in SCHEDULES.items() if spec.has_pairs]
EXCHANGES = 4


def paired(name, p, m, *, pairs=True):
    v = CHUNKS[name] if SCHEDULES[name].virtual_stages is None else None
    return with_transfers(SCHEDULES[name].build(p, m, v=v, pairs=pairs), overlap=True)


def seconds(schedule, ratio):
    """Of a step whose forward takes a second and whose backward takes two, with exchanges of `ratio` of all."""
    v = schedule.placement.num_stages // schedule.placement.num_ranks
    times = dict.fromkeys(("forward", "input_grad", "weight_grad"), 1 / v)
    exchanged = dict.fromkeys(("forward_exchange", "backward_exchange"), 1.5 * ratio / v)
    costs = Costs.uniform(schedule.placement.num_stages, **times, **exchanged)
    return simulate(schedule, costs, exchanges=EXCHANGES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", range(1, 7))
def test_every_size_can_be_run(name, p):
    if p == 1 and name == "interleaved":
        p = 8
    for m in (1, 2, 3, p, p + 1, 2 * p - 1, 2 * p, 4 * p + 1):
        schedule = paired(name, p, m)
        check(schedule)
        check(with_offload(schedule))
        if m >= 4 * p:  # with fewer microbatches a longer warm-up may take more time than exchanges that are hidden
            assert seconds(schedule, 0.5).makespan <= seconds(paired(name, p, m, pairs=False), 0.5).makespan + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_nearly_all_backwards_are_in_pairs(name):
    """Those at the end, when all forwards have run, are not."""
    p, m = 4, 32
    schedule = paired(name, p, m)
    for rank in range(p):
        units = schedule.units(rank)
        together = [unit for unit in units if len(unit) == 2]
        chunks = len(schedule.placement.stages_of(rank))
        assert len(together) >= chunks * (m - 3 * p)
        for backward, forward in together:
            assert forward.kind is Kind.FORWARD and backward.kind in GRADIENTS_OF_INPUT
            assert forward.microbatch != backward.microbatch


def test_one_stage_by_hand():
    """Begun by a backward, a pair keeps parts of two microbatches, and never two whole ones."""
    schedule = paired("1f1b", 1, 4)
    units = ["|".join(map(str, unit)) for unit in schedule.units(0)]
    assert units == ["F0@0", "B0@0|F1@0", "B1@0|F2@0", "B2@0|F3@0", "B3@0"]
    assert [rank.activations for rank in memory_in_flight(schedule)] == [1]


def test_two_stages_by_hand():
    """Rank 0 has one forward more before its first backward, so that both ranks work at any time."""
    schedule = paired("1f1b", 2, 4)
    assert [str(action) for action in schedule.actions[1]] == [
        *("RF0@1", "RF1@1", "F0@1", "RF2@1", "B0@1", "F1@1", "RF3@1", "SB0@1", "B1@1", "F2@1", "SB1@1"),
        *("B2@1", "F3@1", "SB2@1", "B3@1", "SB3@1"),
    ]
    assert {str(action) for action in schedule.with_next} == {"B0@0", "B0@1", "B1@1", "B2@1"}
    assert [rank.activations for rank in memory_in_flight(schedule)] == [3, 1]


def test_few_microbatches_do_not_wait_for_each_other():
    schedule = paired("1f1b", 4, 2)
    assert {str(action) for action in schedule.with_next} == {"B0@3"}
    assert [str(action) for action in schedule.actions[0] if action.kind in COMPUTE] == ["F0@0", "F1@0", "B0@0", "B1@0"]


def test_weight_gradients_come_behind_a_pair():
    schedule = paired("zb-v", 2, 5)
    assert ["|".join(map(str, unit)) for unit in schedule.units(0)][4:8] == ["I0@3|F1@3", "W0@3", "I1@3|F3@0", "W1@3"]


@pytest.mark.parametrize(("ratio", "most"), [(0.0, 48), (0.5, 49.5), (1.0, 61.5)])
def test_the_time_of_one_stage_by_hand(ratio, most):
    """Sixteen microbatches. With a half, the exchanges of a forward and of a backward alone are exposed; with as much as
    is computed, a backward's exchange also outlasts the forward's part."""
    alone = seconds(paired("1f1b", 1, 16, pairs=False), ratio)
    assert alone.makespan == pytest.approx(48 * (1 + ratio))
    assert alone.exposed == pytest.approx([48 * ratio])
    together = seconds(paired("1f1b", 1, 16), ratio)
    assert together.makespan == pytest.approx(most)
    assert together.exposed == pytest.approx([most - 48]) and together.busy(0) == pytest.approx(48)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 4])
def test_exchanges_are_hidden_in_every_schedule(name, p):
    """Half of the computation in exchanges, of which at most a quarter is exposed with 32 microbatches."""
    without, alone, together = (
        seconds(paired(name, p, 32, pairs=pairs), ratio).makespan
        for pairs, ratio in ((True, 0.0), (False, 0.5), (True, 0.5))
    )
    assert together - without < 0.25 * (alone - without)


def test_exchanges_that_take_no_time_change_nothing():
    for name in NAMES:
        schedule = paired(name, 2, 9)
        v = schedule.placement.num_stages // 2
        plain = simulate(schedule, Costs.uniform(2 * v, forward=1.0, input_grad=1.5, weight_grad=0.5))
        parts = simulate(schedule, Costs.uniform(2 * v, forward=1.0, input_grad=1.5, weight_grad=0.5), exchanges=3)
        assert parts.makespan == pytest.approx(plain.makespan)


@pytest.mark.parametrize(
    ("firsts", "words"),
    [
        ({Action(Kind.FORWARD, 0, 0)}, "F0@0 cannot run together with B0@0"),
        ({Action(Kind.BACKWARD, 0, 3)}, "B3@0 cannot run together with None"),
        ({Action(Kind.BACKWARD, 0, 9)}, "B9@0 cannot run together with None"),
    ],
)
def test_what_cannot_run_together_is_found(firsts, words):
    schedule = dataclasses.replace(SCHEDULES["1f1b"].build(1, 4, pairs=True), with_next=frozenset(firsts))
    with pytest.raises(ScheduleError, match=words):
        check(schedule)


def test_pairs_that_wait_for_each_other_are_found():
    """Rank 0 would keep its last forward back until a backward that needs it."""
    computations = [["F0@0", "B0@0", "F1@0", "B1@0"], ["F0@1", "F1@1", "B0@1", "B1@1"]]
    kinds = {kind.value: kind for kind in Kind}
    lists = tuple(tuple(Action(kinds[a[0]], int(a[3]), int(a[1])) for a in actions) for actions in computations)
    wrong = Schedule("wrong", round_robin(2), 2, lists, frozenset({Action(Kind.BACKWARD, 0, 0)}))
    with pytest.raises(ScheduleError, match="rank 0 at B0@0, for B0@1; rank 1 at F1@1, for F1@0"):
        check(wrong)
