"""Where moves of activations stand in a list, what the validator and the simulator make of them, and what they save."""

import dataclasses
import itertools

import pytest

from megatron.planner.memory.activation_offload import StageTimes, largest_hidden_ratio
from megatron.schedule.costs import Costs
from megatron.schedule.offload_pass import APART, moved_groups, with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import schedule_or_default
from megatron.schedule.schedule import COMPUTE, COPIES, Action, Kind, ScheduleError
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.simulate import simulate
from megatron.schedule.validate import check, chunks_on_device
from tests.unit.offload.closed_form import peak_chunks, share_by_layer

from .lists import all_schedules, gpipe, one_f_one_b, text, zb_h1

F, B, O, L = Kind.FORWARD, Kind.BACKWARD, Kind.OFFLOAD, Kind.RELOAD


def test_a_list_by_hand():
    """The first rank of four: 0 goes out beside F1 and comes back beside F3, the last forward before its backward."""
    moved = with_offload(one_f_one_b(4, 5))
    assert text(moved.actions[0]) == ("F0 O0 F1 O1 F2 O2 L0 F3 O3 B0 L1 F4 O4 L2 B1 L3 B2 L4 B3 B4")
    assert text(moved.actions[3]) == text(one_f_one_b(4, 5).actions[3])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 5), (4, 4), (4, 9)])
def test_moves_of_every_schedule(p, m, overlap):
    for name, plain in all_schedules(p, m).items():
        sent = with_transfers(plain, overlap=overlap)
        moved = with_offload(sent)
        check(moved, blocking=not overlap)
        assert tuple(tuple(a for a in rank if a.kind not in COPIES) for rank in moved.actions) == sent.actions, name
        for actions in moved.actions:
            check_slots(actions)


def check_slots(actions):
    """A computation on the way out, one away, one on the way back; behind all messages of the place; one at a time."""
    order = {action: number for number, action in enumerate(a for a in actions if a.kind in COMPUTE)}
    groups = moved_groups(actions)
    for action, number in order.items():
        if action.kind is F:
            back = next((n for a, n in order.items() if a.kind.value in "BI" and a[1:] == action[1:]))
            assert ((action.stage, action.microbatch) in groups) == (back - number >= APART)
    done = -1
    for action, following in itertools.pairwise(actions):
        done = order.get(action, done)
        if action.kind is O:
            assert done == order[Action(F, *action[1:])]
        if action.kind is L:
            back = next(n for a, n in order.items() if a.kind.value in "BI" and a[1:] == action[1:])
            assert done == back - 2
        if action.kind in COPIES:
            assert following.kind in COMPUTE | COPIES, f"{following} is queued behind {action}"
    for kind in (O, L):
        between = [a.kind for a in actions if a.kind in (kind, *COMPUTE)]
        assert (kind, kind) not in itertools.pairwise(between)


def test_an_evaluation_moves_nothing():
    plain = forward_only(one_f_one_b(4, 8))
    assert with_offload(plain) == plain


class TestDamage:
    MOVED = with_offload(with_transfers(one_f_one_b(4, 5), overlap=True))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda actions: actions.remove(Action(L, 0, 1)), "O1@0 has no L1@0"),
            (lambda actions: actions.remove(Action(O, 0, 1)), "L1@0 has no O1@0"),
            (lambda actions: actions.insert(0, actions.pop(actions.index(Action(O, 0, 1)))), "O1@0 comes before F1@0"),
            (lambda actions: actions.append(actions.pop(actions.index(Action(L, 0, 1)))), "B1@0 comes before L1@0"),
            (lambda actions: actions.insert(0, actions.pop(actions.index(Action(L, 0, 1)))), "L1@0 comes before O1@0"),
        ],
    )
    def test_is_found(self, change, message):
        check(self.MOVED)
        lists = [list(actions) for actions in self.MOVED.actions]
        change(lists[0])
        with pytest.raises(ScheduleError, match=message):
            check(dataclasses.replace(self.MOVED, actions=tuple(map(tuple, lists))))


class TestTimes:
    def test_copies_that_fit_cost_nothing(self):
        """In 1F1B the way out has a forward or a backward, the way back a forward."""
        for plain in (gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8)):
            sent = with_transfers(plain, overlap=True)
            whole = simulate(sent, Costs.uniform(4)).makespan
            assert simulate(with_offload(sent), Costs.uniform(4, offload=1.0, reload=1.0)).makespan == whole
            assert simulate(with_offload(sent), Costs.uniform(4, offload=1.0, reload=1.5)).makespan > whole

    def test_who_waits_for_what(self):
        """Rank 0 of 1F1B by hand, copies of 1.5 beside forwards of 1: the second forward after an offload waits."""
        timeline = simulate(with_offload(one_f_one_b(4, 5)), Costs.uniform(4, offload=1.5, reload=0.0))
        start = {str(i.action): i.start for i in timeline.intervals[0]}
        assert [start[f"F{k}@0"] for k in range(4)] == [0.0, 1.0, 2.5, 4.0]
        assert start["O1@0"] == 2.5, "one way carries one copy at a time"

    def test_a_reload_waits_for_its_offload(self):
        schedule = with_offload(one_f_one_b(4, 5))
        timeline = simulate(schedule, Costs.uniform(4, offload=10.0))
        by_action = {i.action: i for rank in timeline.intervals for i in rank}
        for action, interval in by_action.items():
            if action.kind is L:
                assert interval.start >= by_action[Action(O, *action[1:])].stop


class TestMemory:
    @pytest.mark.parametrize("v", [1, 2, 3, 4])
    @pytest.mark.parametrize("p", [2, 3, 4, 8])
    def test_the_closed_form_is_what_the_list_holds(self, p, v):
        schedule = with_offload(schedule_or_default(None, v).build(p, 2 * p, v=v))
        for ratio, layers in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), (1, 2, 3, 8)):
            counted = chunks_on_device(schedule, ratio, unmoved=share_by_layer(layers, ratio))
            assert counted == pytest.approx([peak_chunks(p, v, rank, ratio, layers) for rank in range(p)])

    def test_without_moves_all_chunks_are_near(self):
        assert chunks_on_device(one_f_one_b(4, 8), 1.0) == (4.0, 3.0, 2.0, 1.0)


class TestAuto:
    def stages(self, nbytes, layers=2):
        return [StageTimes(forward=1.0, backward=2.0, input_grad=0.0, nbytes=nbytes, layers=layers) for _ in range(4)]

    def test_the_copy_fills_the_forward(self):
        sent = with_transfers(one_f_one_b(4, 8), overlap=True)
        assert largest_hidden_ratio(sent, self.stages(100), 1000.0, 1000.0) == 1.0
        assert largest_hidden_ratio(sent, self.stages(100), 100.0, 60.0) == pytest.approx(0.6)
        # On the way out the warm-up's forwards wait, in time that the first rank has before its first backward.
        assert largest_hidden_ratio(sent, self.stages(100), 30.0, 1000.0) == pytest.approx(0.6)
        assert largest_hidden_ratio(sent, self.stages(100), 1.0, 1.0) == 0.0

    def test_where_layers_move_the_way_back_has_a_backward(self):
        alone = one_f_one_b(1, 4)
        assert largest_hidden_ratio(alone, self.stages(100, layers=8)[:1], 1000.0, 25.0) == pytest.approx(0.5)
        assert largest_hidden_ratio(alone, self.stages(100, layers=2)[:1], 1.0, 1.0) == 1.0, "nothing would move"
