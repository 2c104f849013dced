"""Every schedule: valid for any size, idle for as long as its paper says, and within the memory it promises."""

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.costs import Costs
from megatron.schedule.schedule import Kind
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.schedules.interleaved import group_sizes
from megatron.schedule.schedules.interleaved import interleaved as interleaved_lists
from megatron.schedule.simulate import simulate
from megatron.schedule.spec import ScheduleSizes
from megatron.schedule.validate import check, memory_in_flight

from .lists import all_schedules, gpipe, interleaved, one_f_one_b, text, zb_h1, zb_v

RANKS = range(1, 9)
MICROBATCHES = range(1, 33)


def play(schedule, **costs):
    return simulate(schedule, Costs.uniform(schedule.placement.num_stages, **costs))


def kept(schedule):
    return [in_flight.activations for in_flight in memory_in_flight(schedule)]


def test_a_stage_sees_its_microbatches_in_order():
    """Of every kind, so that gradients add up in the same order under any schedule."""
    for p, m in ((1, 3), (3, 2), (4, 9), (5, 32)):
        for schedule in all_schedules(p, m).values():
            for actions in schedule.actions:
                for kind, stage in {(action.kind, action.stage) for action in actions}:
                    seen = [a.microbatch for a in actions if (a.kind, a.stage) == (kind, stage)]
                    assert seen == list(range(m))


@pytest.mark.parametrize("p", RANKS)
def test_every_schedule_of_every_size(p):
    """Valid (`check`), and its memory and time as promised; with F = I = W = 1 for a stage."""
    for m in MICROBATCHES:
        for name, schedule in all_schedules(p, m).items():
            check(schedule)
            v = schedule.placement.num_stages // p
            assert kept(schedule) == known_memory(name, p, v, m), (name, m)
            if m in interesting(p):
                assert play(schedule).makespan == known_time(name, p, v, m), (name, m)


def interesting(p):
    """Numbers of microbatches at which a schedule's form changes, and a long one."""
    return {*range(1, p + 2), 2 * p - 2, 2 * p - 1, 2 * p, 3 * p - 1, 32}


def known_time(name, p, v, m):
    if name == "zb-h1":
        return 3 * m + p - 1 + max(0, p - m)
    if name == "zb-v":
        return max(6 * m + p - 1, 4 * m + 3 * p - 1, 4 * p + 2 * m - 1)  # the last: one microbatch's way, m - 1 behind
    if name in ("gpipe", "1f1b") or m >= p:
        return 3 * (v * m + p - 1)
    return 3 * (v * p + m - 1)  # the first microbatch's way through all stages and back, and m - 1 behind it


def known_memory(name, p, v, m):
    if name == "gpipe":
        return [m] * p
    if name == "1f1b":
        return [min(m, p - rank) for rank in range(p)]
    if name == "zb-h1":
        return [min(m, p)] * p
    if name == "zb-v":
        return [min(2 * m, 2 * p)] * p
    largest = max(group_sizes(p, m, p))
    return [min(v * m, (v - 1) * largest + 2 * (p - rank - 1) + 1) for rank in range(p)]


class TestByHand:
    """Short lists, followed on paper."""

    def test_gpipe(self):
        assert text(gpipe(3, 2).actions[1]) == "F0 F1 B0 B1"

    @pytest.mark.parametrize(
        ("p", "m", "rank", "expected"),
        [
            (1, 3, 0, "F0 B0 F1 B1 F2 B2"),
            (3, 4, 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
            (3, 2, 2, "F0 B0 F1 B1"),
            (8, 2, 0, "F0 F1 B0 B1"),
        ],
    )
    def test_one_f_one_b(self, p, m, rank, expected):
        assert text(one_f_one_b(p, m).actions[rank]) == expected

    def test_interleaved(self):
        ranks = [text(actions) for actions in interleaved(2, 2, 4).actions]
        assert ranks == [
            "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
            "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
        ]

    def test_interleaved_groups(self):
        assert text(interleaved(2, 2, 6, group=3).actions[1]).startswith("F0 F1 F2 F0' B0' F1' B1' F2' B2' F3 B0 F4 B1")

    def test_zb_h1(self):
        ranks = [text(actions) for actions in zb_h1(3, 4).actions]
        assert ranks == [
            "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
            "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
            "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
        ]

    def test_zb_v(self):
        ranks = [text(actions) for actions in zb_v(2, 3).actions]
        assert ranks == [
            "F0 F1 F2 F0' I0' W0' F1' I1' W1' I0 W0 F2' I2' I1 W2' I2 W1 W2",
            "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' I1 I2' I2 W1' W1 W2' W2",
        ]

    def test_zb_v_with_few_microbatches_leaves_out_the_rest(self):
        assert text(zb_v(2, 1).actions[1]) == "F0 F0' I0' I0 W0' W0"


class TestBubbles:
    """The published shares of the step, from the simulator's own figures."""

    @pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 32), (5, 3)])
    def test_gpipe_and_one_f_one_b(self, p, m):
        for schedule in (gpipe(p, m), one_f_one_b(p, m)):
            timeline = play(schedule, forward=0.7, backward=1.9)
            assert [timeline.bubble(rank) for rank in range(p)] == pytest.approx([(p - 1) / (m + p - 1)] * p)

    @pytest.mark.parametrize("group", [None, 8, 11])
    @pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 4, 32), (8, 3, 24), (4, 2, 22), (4, 2, 9), (3, 2, 5)])
    def test_interleaved(self, p, v, m, group):
        timeline = play(interleaved(p, v, m, group), forward=0.7, backward=1.9)
        assert timeline.bubble(0) == pytest.approx((p - 1) / (v * m + p - 1))

    @pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1.2, 0.8), (1, 0.9, 0.9), (1, 2, 0.5)])
    @pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 8), (8, 20)])
    def test_zb_h1(self, p, m, costs):
        forward, input_grad, weight_grad = costs
        timeline = play(zb_h1(p, m), forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        idle = (p - 1) * (forward + input_grad - weight_grad)
        assert timeline.makespan - timeline.busy(0) == pytest.approx(idle)

    @pytest.mark.parametrize("p", RANKS)
    def test_zb_v_is_never_idle_inside(self, p):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            timeline = play(zb_v(p, m))
            assert max(timeline.idle_inside(rank) for rank in range(p)) == 0
            assert timeline.makespan == 6 * m + p - 1, "the last rank begins p - 1 chunks late"

    def test_zb_v_is_below_zb_h1_with_usual_costs(self):
        """Attention's backward has no weight gradient, so W is shorter than I."""
        costs = {"forward": 1.0, "input_grad": 1.15, "weight_grad": 0.85}
        whole = {name: 2 * seconds for name, seconds in costs.items()}
        assert play(zb_v(8, 32), **costs).makespan < play(zb_h1(8, 32), **whole).makespan


class TestInterleavedGroups:
    def test_as_megatron_forms_them(self):
        assert group_sizes(4, 8, 4) == [4, 4]
        assert group_sizes(4, 17, 6) == [6, 6, 5]
        assert group_sizes(4, 6, 8) == [6]

    def test_a_small_remainder_is_spread(self):
        assert group_sizes(4, 9, 4) == [5, 4]
        assert group_sizes(8, 35, 10) == [9, 9, 9, 8]
        assert group_sizes(4, 7, 4) == [7]
        assert group_sizes(4, 3, 4) == [3]

    def test_none_is_smaller_than_the_pipeline_while_there_are_enough(self):
        for p in RANKS:
            for m in MICROBATCHES:
                for group in (p, p + 1, 2 * p, 40):
                    sizes = group_sizes(p, m, group)
                    assert sum(sizes) == m and min(sizes) >= min(p, m)
                    assert max(sizes) < group + p

    def test_too_small_a_group(self):
        with pytest.raises(
            ConfigError, match=r"virtual-pipeline-stage 3 is below --pipeline-model-parallel-size 4; give 4"
        ):
            interleaved(4, 2, 8, group=3)

    @pytest.mark.parametrize("p", [2, 3, 5, 8])
    def test_larger_groups_are_valid_too(self, p):
        for m in (1, p - 1, p, 2 * p + 1, 3 * p - 1, 29):
            for group in (p + 1, 2 * p - 1, 2 * p, 50):
                check(interleaved(p, 3, m, group))

    def test_one_chunk_is_one_f_one_b(self):
        assert interleaved_lists(ScheduleSizes(p=4, v=1, m=10, group=4)) == one_f_one_b(4, 10).actions


class TestForwardOnly:
    @pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
    def test_valid_and_in_the_least_time(self, p):
        for m in sorted(interesting(p) - {0}):
            for name, training in all_schedules(p, m).items():
                schedule = forward_only(training)
                check(schedule)
                assert {action.kind for actions in schedule.actions for action in actions} == {Kind.FORWARD}
                v = training.placement.num_stages // p
                least = 2 * m + 2 * p - 2 if name == "zb-v" else v * m + p - 1 if m >= p else v * p + m - 1
                assert play(schedule).makespan == least, (name, m)
                assert kept(schedule) == [0] * p
