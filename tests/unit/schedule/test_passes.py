"""What passes insert: every transfer once, where it belongs, in an order that no transport can lock up in."""

import dataclasses

import pytest

from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.schedule import COMPUTE, RECEIVES, TRANSFERS, Kind, ScheduleError
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.simulate import simulate
from megatron.schedule.validate import check

from .lists import all_schedules, gpipe, interleaved, one_f_one_b, text, zb_h1, zb_v


def sizes(p):
    return sorted({1, max(1, p - 1), p + 1, 2 * p})


def of_kinds(schedule, kinds):
    return tuple(tuple(a for a in actions if a.kind in kinds) for actions in schedule.actions)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("p", range(1, 9))
def test_every_schedule_with_transfers(p, overlap):
    """Valid, even for a blocking transport unless transfers overlap; and as fast as without them."""
    for m in sizes(p):
        for name, plain in all_schedules(p, m).items():
            schedule = with_transfers(plain, overlap=overlap)
            check(schedule, blocking=not overlap)
            assert of_kinds(schedule, COMPUTE) == plain.actions
            costs = Costs.uniform(plain.placement.num_stages)
            assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan, (name, m)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("p", [2, 5, 8])
def test_evaluation(p, overlap):
    for m in sizes(p):
        for plain in all_schedules(p, m).values():
            schedule = with_transfers(forward_only(plain), overlap=overlap)
            check(schedule, blocking=not overlap)
            assert {a.kind for a in schedule.actions[0]} <= {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}


def test_by_hand_without_overlap():
    ranks = with_transfers(one_f_one_b(2, 3), overlap=False).actions
    assert [text(actions) for actions in ranks] == [
        "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 B1 RB2 B2",
        "RF0 F0 B0 RF1 SB0 F1 B1 RF2 SB1 F2 B2 SB2",
    ], "both ranks issue the transfers in one order: SF0 SF1 SB0 SF2 SB1 SB2"


def test_by_hand_with_overlap():
    ranks = with_transfers(one_f_one_b(2, 3), overlap=True).actions
    assert [text(actions) for actions in ranks] == [
        "F0 RB0 SF0 F1 SF1 B0 RB1 F2 RB2 SF2 B1 B2",
        "RF0 F0 RF1 B0 SB0 F1 RF2 B1 SB1 F2 B2 SB2",
    ]


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 9), zb_h1(4, 9), interleaved(4, 2, 8), interleaved(4, 3, 9)])
def test_overlap_posts_one_computation_ahead(schedule):
    """Exactly one, in warm-up and cool-down too, where each direction between two ranks carries one kind only."""
    for plain, actions in zip(schedule.actions, with_transfers(schedule, overlap=True).actions, strict=True):
        for number, action in enumerate(plain):
            if (receive := schedule.receive_before(action)) is not None:
                behind = [a for a in actions[actions.index(receive) :] if a.kind in COMPUTE]
                assert behind.index(action) == min(number, 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_few_receives_are_posted_at_once(p):
    """Each takes a buffer: two suffice where directions carry one kind, a few more where they carry both."""
    for name, plain in all_schedules(p, 2 * p + 1).items():
        mixed = name == "zb-v" or p == 2
        assert most_posted(with_transfers(plain, overlap=True)) <= (4 if mixed else 2), name


def most_posted(schedule):
    most = 0
    for actions in schedule.actions:
        posted = 0
        for action in actions:
            posted += action.kind in RECEIVES
            most = max(most, posted)
            posted -= action.kind in COMPUTE and schedule.receive_before(action) is not None
        assert posted == 0
    return most


def test_overlap_hides_transfers_where_the_schedule_leaves_room():
    """A larger group leaves a transfer more than the computation beside it."""
    costs = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "transfer": 0.5}
    spans = {}
    for group in (4, 8):
        for overlap in (True, False):
            schedule = with_transfers(interleaved(4, 2, 16, group), overlap=overlap)
            spans[group, overlap] = simulate(schedule, Costs.uniform(8, **costs), blocking=not overlap).makespan
    assert spans[8, True] < spans[4, True] < spans[4, False]


def test_overlap_is_not_promised_to_a_blocking_transport():
    schedule = with_transfers(one_f_one_b(4, 8), overlap=True)
    check(schedule)
    with pytest.raises(ScheduleError, match="ranks wait for each other: rank 0 at"):
        check(schedule, blocking=True)


def test_transfers_are_added_once():
    with pytest.raises(AssertionError, match="holds SF0@0 already"):
        with_transfers(with_transfers(gpipe(2, 1), overlap=False), overlap=False)


def test_nothing_travels_inside_a_rank():
    for schedule in (one_f_one_b(1, 3), interleaved(1, 3, 3), zb_v(1, 3)):
        assert with_transfers(schedule, overlap=True).actions == schedule.actions
    sends = of_kinds(with_transfers(zb_v(3, 5), overlap=True), TRANSFERS)[2]
    assert {action.stage for action in sends} == {2, 3}
    assert not {Kind.SEND_FORWARD} & {action.kind for action in sends if action.stage == 2}, "the turn of the V"


def test_passes_keep_the_rest_of_the_schedule():
    plain = zb_v(3, 5)
    changed = with_transfers(plain, overlap=True)
    assert dataclasses.replace(changed, actions=plain.actions) == plain


@pytest.mark.parametrize("p", [3, 4, 7, 8])
def test_blocking_pairs_move_at_the_same_time(p):
    """Where all ranks are done at once, data moves in two turns, three in an odd ring; not rank by rank round the
    ring."""
    plain = forward_only(interleaved(p, 2, 2 * p))
    schedule = with_transfers(plain, overlap=False)
    timeline = simulate(schedule, Costs.uniform(2 * p, forward=1.0, transfer=0.5), blocking=True)
    ticks = simulate(plain, Costs.uniform(2 * p)).makespan
    assert timeline.makespan <= ticks * (1 + 0.5 * (2 if p % 2 == 0 else 3))
