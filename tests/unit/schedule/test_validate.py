"""The validator finds what is wrong with a damaged schedule, and says where."""

import dataclasses

import pytest

from megatron.schedule.passes import with_transfers
from megatron.schedule.schedule import Action, Kind, Schedule, ScheduleError, round_robin
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.validate import InFlight, check, memory_in_flight

from .lists import gpipe, interleaved, one_f_one_b, zb_h1, zb_v

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
SF, RF, SB, RB = Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD


def changed(schedule, rank, change):
    """The schedule with `change` applied to the rank's list."""
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    return dataclasses.replace(schedule, actions=tuple(map(tuple, lists)))


def swap(first, second):
    def change(actions):
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = second, first

    return change


def move(action, before):
    def change(actions):
        actions.remove(action)
        actions.insert(actions.index(before), action)

    return change


def drop(action):
    return lambda actions: actions.remove(action)


def add(action, index=0):
    return lambda actions: actions.insert(index, action)


PLAIN = one_f_one_b(3, 4)
SENT = with_transfers(PLAIN, overlap=False)


@pytest.mark.parametrize(
    ("schedule", "rank", "change", "message"),
    [
        (PLAIN, 1, drop(Action(F, 1, 2)), r"1f1b, rank 1: F2@1 is missing"),
        (PLAIN, 1, drop(Action(B, 1, 2)), r"rank 1: B2@1 is missing"),
        (PLAIN, 1, add(Action(F, 1, 0)), r"rank 1: F0@1 comes twice"),
        (PLAIN, 1, add(Action(F, 2, 0)), r"rank 1: F0@2 is not of this rank's stages"),
        (PLAIN, 1, add(Action(F, 3, 0)), r"rank 1: F0@3 is not of this rank's stages"),
        (PLAIN, 1, add(Action(F, 1, 4)), r"rank 1: F4@1 is of microbatch 4, of 4"),
        (PLAIN, 1, swap(Action(F, 1, 1), Action(B, 1, 1)), r"rank 1: B1@1 comes before F1@1"),
        (zb_h1(3, 4), 1, swap(Action(I, 1, 0), Action(W, 1, 0)), r"zb-h1, rank 1: W0@1 comes before I0@1"),
        (zb_h1(3, 4), 1, drop(Action(W, 1, 3)), r"rank 1: W3@1 is missing"),
        (zb_h1(3, 4), 1, add(Action(B, 1, 0), 9), r"zb-h1 has whole backwards and split ones"),
        (SENT, 1, drop(Action(SF, 1, 2)), r"rank 1: SF2@1 is missing or comes before F2@1"),
        (SENT, 1, drop(Action(RF, 1, 2)), r"rank 1: RF2@1 is missing or comes after F2@1"),
        (SENT, 1, move(Action(SF, 1, 2), before=Action(F, 1, 2)), r"rank 1: SF2@1 is missing or comes before F2@1"),
        (SENT, 1, swap(Action(RB, 1, 2), Action(B, 1, 2)), r"rank 1: RB2@1 is missing or comes after B2@1"),
        (SENT, 2, add(Action(SF, 2, 0), 4), r"rank 2: SF0@2 moves nothing between ranks"),
        (SENT, 0, swap(Action(SF, 0, 0), Action(SF, 0, 1)), r"rank 0: SF1@0 is missing or comes before F1@0"),
    ],
)
def test_damage_is_found(schedule, rank, change, message):
    check(schedule)
    with pytest.raises(ScheduleError, match=message):
        check(changed(schedule, rank, change))


def test_lists_for_other_ranks():
    with pytest.raises(ScheduleError, match="has lists for 3 ranks, but stages on 2"):
        check(dataclasses.replace(PLAIN, placement=round_robin(2, 2)))


class TestDeadlock:
    def test_too_short_a_warm_up(self):
        """The first rank wants microbatch 0's gradient before it has sent microbatch 1, which the last rank runs
        first."""
        actions = (
            (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
            (Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),
        )
        with pytest.raises(ScheduleError, match="rank 0 at B0@0, for B0@1; rank 1 at F1@1, for F1@0"):
            check(Schedule("short", round_robin(2), 2, actions))

    def test_interleaving_groups_smaller_than_the_pipeline(self):
        """Why `group_sizes` makes none: in Megatron's order with groups of 2 on 4 ranks, nobody can go on."""
        lists = []
        for rank in range(4):
            forwards = [Action(F, c * 4 + rank, k) for g in (0, 2, 4, 6) for c in range(2) for k in (g, g + 1)]
            backwards = [Action(B, c * 4 + rank, k) for g in (0, 2, 4, 6) for c in (1, 0) for k in (g, g + 1)]
            warm_up = 2 + 2 * (3 - rank)
            actions = forwards[:warm_up]
            for pair in zip(forwards[warm_up:], backwards, strict=False):
                actions += pair
            lists.append((*actions, *backwards[len(forwards) - warm_up :]))
        with pytest.raises(ScheduleError, match="ranks wait for each other"):
            check(Schedule("small groups", round_robin(4, 2), 8, tuple(lists)))

    def test_computations_in_an_order_that_transfers_cannot_follow(self):
        """Both ends agree on each direction, yet each waits for what the other sends only afterwards."""
        in_turn = tuple(
            tuple(Action(kind, rank, k) for k in range(2) for kind in (F, B))
            for rank in range(2)  # one microbatch at a time
        )
        schedule = with_transfers(Schedule("in turn", round_robin(2), 2, in_turn), overlap=False)
        check(schedule, blocking=True)
        late = changed(schedule, 1, move(Action(RF, 1, 1), before=Action(B, 1, 0)))
        late = changed(late, 1, move(Action(F, 1, 1), before=Action(B, 1, 0)))
        with pytest.raises(ScheduleError, match="rank 0 at B0@0, for SB0@1; rank 1 at F1@1, for SF1@0"):
            check(late)

    def test_ends_that_disagree_on_a_direction(self):
        schedule = with_transfers(gpipe(2, 3), overlap=True)
        check(schedule)
        receives = changed(schedule, 1, move(Action(RF, 1, 1), before=Action(RF, 1, 0)))
        with pytest.raises(ScheduleError, match="gpipe, rank 1: RF1@1 comes before RF0@1, but SF1@0 after SF0@0"):
            check(receives)

    def test_blocking_transfers_that_meet_head_on(self):
        """Each rank sends first: fine for sends that go their own way, not where both stand still."""
        lists = (
            [Action(F, 0, 0), Action(SF, 0, 0), Action(F, 0, 1), Action(SF, 0, 1), Action(RB, 0, 0)],
            [Action(RF, 1, 0), Action(F, 1, 0), Action(B, 1, 0), Action(SB, 1, 0), Action(RF, 1, 1), Action(F, 1, 1)],
        )
        lists[0].extend([Action(B, 0, 0), Action(RB, 0, 1), Action(B, 0, 1)])
        lists[1].extend([Action(B, 1, 1), Action(SB, 1, 1)])
        schedule = Schedule("head on", round_robin(2), 2, tuple(map(tuple, lists)))
        check(schedule)
        with pytest.raises(ScheduleError, match="rank 0 at SF1@0, for RF1@1; rank 1 at SB0@1, for RB0@0"):
            check(schedule, blocking=True)


class TestMemory:
    def test_whole_backwards(self):
        assert memory_in_flight(one_f_one_b(3, 5)) == (InFlight(3, 3, 0), InFlight(2, 2, 0), InFlight(1, 1, 0))

    def test_split_backwards(self):
        """F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3: three wait for a half at most, one for both."""
        assert memory_in_flight(zb_h1(3, 4))[2] == InFlight(3, 1, 3)

    def test_counts_chunks(self):
        assert [kept.activations for kept in memory_in_flight(zb_v(4, 8))] == [8, 8, 8, 8]
        assert [kept.activations for kept in memory_in_flight(interleaved(4, 2, 8))] == [11, 9, 7, 5]

    def test_transfers_change_nothing(self):
        assert memory_in_flight(with_transfers(PLAIN, overlap=True)) == memory_in_flight(PLAIN)

    def test_evaluation_keeps_nothing(self):
        assert memory_in_flight(forward_only(PLAIN)) == (InFlight(0, 0, 0),) * 3
