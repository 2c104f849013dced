"""Times, followed on paper."""

import dataclasses

import pytest

from megatron.schedule.costs import Costs, column
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.schedule import COPIES, Action, Kind, ScheduleError
from megatron.schedule.simulate import ActionInterval, simulate

from .lists import gpipe, one_f_one_b, zb_h1

F, B = Kind.FORWARD, Kind.BACKWARD


def times(timeline, rank):
    """{text: (start, stop)} of a rank."""
    return {str(i.action): (pytest.approx(i.start), pytest.approx(i.stop)) for i in timeline.intervals[rank]}


def test_dependencies_alone():
    timeline = simulate(one_f_one_b(2, 2), Costs.uniform(2, forward=1, backward=3))
    assert times(timeline, 0) == {"F0@0": (0, 1), "F1@0": (1, 2), "B0@0": (5, 8), "B1@0": (9, 12)}
    assert times(timeline, 1) == {"F0@1": (1, 2), "B0@1": (2, 5), "F1@1": (5, 6), "B1@1": (6, 9)}
    assert (timeline.makespan, timeline.busy(0)) == (12, 8)
    assert timeline.bubble(0) == timeline.bubble(1) == pytest.approx(1 / 3)
    assert timeline.idle_inside(0) == pytest.approx(1 / 3) and timeline.idle_inside(1) == 0
    assert timeline.exposed == (0, 0)


def test_stages_may_differ():
    costs = dataclasses.replace(Costs.uniform(2), forward=column([1.0, 4.0]), backward=column([2.0, 6.0]))
    timeline = simulate(gpipe(2, 1), costs)
    assert times(timeline, 0) == {"F0@0": (0, 1), "B0@0": (11, 13)}
    assert times(timeline, 1) == {"F0@1": (1, 5), "B0@1": (5, 11)}


def test_a_whole_backward_is_the_sum_of_its_halves_unless_said():
    assert Costs.uniform(1, input_grad=1.25, weight_grad=0.5).backward.tolist() == [[1.75]]
    assert simulate(gpipe(1, 1), Costs.uniform(1, forward=1, backward=1.5)).makespan == 2.5


def test_the_stage_before_does_not_wait_for_weights():
    timeline = simulate(zb_h1(2, 1), Costs.uniform(2, forward=1, input_grad=2, weight_grad=5))
    assert times(timeline, 1) == {"F0@1": (1, 2), "I0@1": (2, 4), "W0@1": (4, 9)}
    assert times(timeline, 0) == {"F0@0": (0, 1), "I0@0": (4, 6), "W0@0": (6, 11)}


def test_transfers_beside_computation():
    """0.5 on the way and 0.25 more until it is there. The second forward's transfer hides behind the first forward."""
    costs = Costs.uniform(2, forward=1, backward=1, transfer=0.5, latency=0.25)
    timeline = simulate(with_transfers(gpipe(2, 2), overlap=True), costs)
    assert times(timeline, 0) == {
        "F0@0": (0, 1),
        "SF0@0": (1, 1.75),
        "F1@0": (1, 2),
        "SF1@0": (2, 2.75),
        "RB0@0": (4.75, 5.5),
        "B0@0": (5.5, 6.5),
        "RB1@0": (5.75, 6.5),
        "B1@0": (6.5, 7.5),
    }
    assert [timeline.intervals[1][n].start for n, a in enumerate(timeline.schedule.actions[1]) if a.kind is F] == [
        pytest.approx(1.75),
        pytest.approx(2.75),
    ]
    assert timeline.exposed == (pytest.approx(0.75), pytest.approx(0.75))


def test_one_way_is_one_wire():
    """Two outputs at once: the second leaves when the first has left, and the latency is no part of that."""
    costs = Costs.uniform(2, forward=1, backward=1, transfer=3, latency=1)
    timeline = simulate(with_transfers(gpipe(2, 2), overlap=True), costs)
    sends = {k: v for k, v in times(timeline, 0).items() if k.startswith("SF")}
    assert sends == {"SF0@0": (1, 5), "SF1@0": (4, 8)}


def test_a_transfer_waits_until_both_ends_are_posted():
    """Without overlap the receive is posted when the rank comes to it, here after its first backward."""
    costs = dataclasses.replace(Costs.uniform(2, transfer=0.5), forward=column([1.0, 1.0]), backward=column([9.0, 9.0]))
    schedule = with_transfers(one_f_one_b(2, 2), overlap=False)
    timeline = simulate(schedule, costs)
    assert times(timeline, 1)["B0@1"] == (2.5, 11.5)
    assert times(timeline, 0)["SF1@0"] == (11.5, 12.0)
    ahead = simulate(with_transfers(one_f_one_b(2, 2), overlap=True), costs)
    assert times(ahead, 0)["SF1@0"] == (2.5, 3.0), "posted before the backward, which begins then"


def test_blocking_transfers_hold_up_both_ends():
    costs = Costs.uniform(2, forward=1, backward=1, transfer=0.5)
    timeline = simulate(with_transfers(gpipe(2, 2), overlap=False), costs, blocking=True)
    assert times(timeline, 0)["F1@0"] == (1.5, 2.5)
    assert times(timeline, 0)["SF1@0"] == times(timeline, 1)["RF1@1"] == (2.5, 3.0)
    assert timeline.exposed == (2.0, 2.0), "four transfers at each end"
    assert timeline.makespan == 8


def test_intervals_stand_in_the_order_of_the_list():
    schedule = with_transfers(one_f_one_b(3, 4), overlap=True)
    timeline = simulate(schedule, Costs.uniform(3, transfer=0.1))
    assert [[i.action for i in intervals] for intervals in timeline.intervals] == [list(a) for a in schedule.actions]
    assert timeline.computation(1)[0] == ActionInterval(Action(F, 1, 0), 1.1, 2.1)


def test_a_send_that_nobody_takes():
    schedule = with_transfers(gpipe(2, 1), overlap=False)
    only_one_end = dataclasses.replace(schedule, actions=(schedule.actions[0][:2], ()))
    with pytest.raises(ScheduleError, match="nothing at the other end of SF0@0"):
        simulate(only_one_end, Costs.uniform(2))


def test_boundaries_may_differ():
    """The boundary between stages 1 and 2 crosses nodes: only messages over it take longer, in both directions."""
    costs = dataclasses.replace(Costs.uniform(3), transfer=column([0.0, 0.5]), latency=column([0.0, 0.25]))
    timeline = simulate(with_transfers(gpipe(3, 1), overlap=True), costs)
    assert times(timeline, 1)["F0@1"] == (1, 2) and times(timeline, 2)["F0@2"] == (2.75, 3.75)
    assert times(timeline, 1)["B0@1"] == (6.5, 8.5) and times(timeline, 0)["B0@0"] == (8.5, 10.5)


def test_buckets_are_reduced_inside_the_last_backward():
    """The last backward takes 2 and fills its two buckets after 1 and 2; each takes 1.5 on the wire."""
    costs = Costs.uniform(1, forward=1, backward=2, bucket=1.5)
    timeline = simulate(gpipe(1, 2), costs, num_buckets=2)
    assert timeline.intervals[0][-1].stop == 6
    assert timeline.reduced == (8,) and timeline.makespan == 8, "at 5 and 6.5, one after the other"
    assert simulate(gpipe(1, 2), Costs.uniform(1, forward=1, backward=2)).reduced == (0,)


def test_the_buckets_of_a_split_backward_fill_with_the_weights():
    costs = Costs.uniform(2, forward=1, input_grad=2, weight_grad=5, bucket=1.0)
    timeline = simulate(zb_h1(2, 1), costs, num_buckets=1)
    assert timeline.reduced == (12, 10)


def test_the_first_stages_reduce_behind_the_others():
    """The last rank ends first, so its reduction is hidden, and that of the first rank is not."""
    timeline = simulate(one_f_one_b(2, 2), Costs.uniform(2, forward=1, backward=3, bucket=1.0), num_buckets=1)
    assert timeline.reduced == (13, 10) and timeline.makespan == 13


def test_copies_may_differ():
    schedule = with_offload(one_f_one_b(4, 5))
    costs = dataclasses.replace(
        Costs.uniform(4), offload=column([0.5, 0.25, 0.0, 0.0]), reload=column([0.125, 1.0, 0.0, 0.0])
    )
    timeline = simulate(schedule, costs)
    lengths = {
        (i.action.kind, i.action.stage): i.stop - i.start
        for intervals in timeline.intervals[:2]
        for i in intervals
        if i.action.kind in COPIES
    }
    O, L = Kind.OFFLOAD, Kind.RELOAD
    assert lengths == {(O, 0): 0.5, (L, 0): 0.125, (O, 1): 0.25, (L, 1): 1.0}
