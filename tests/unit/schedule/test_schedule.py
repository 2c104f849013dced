"""The vocabulary of schedules: placements, actions, and who is at the other end."""

import pytest

from megatron.schedule.schedule import Action, Kind, other_end, round_robin, v_shape

from .lists import interleaved, one_f_one_b, zb_v


@pytest.mark.parametrize(
    ("placement", "rank_of", "stages"),
    [
        (round_robin(3), (0, 1, 2), [(0,), (1,), (2,)]),
        (round_robin(2, 3), (0, 1, 0, 1, 0, 1), [(0, 2, 4), (1, 3, 5)]),
        (v_shape(3), (0, 1, 2, 2, 1, 0), [(0, 5), (1, 4), (2, 3)]),
        (v_shape(1), (0, 0), [(0, 1)]),
        (v_shape(2, 3), (0, 1, 1, 0, 0, 1), [(0, 3, 4), (1, 2, 5)]),
    ],
)
def test_placements(placement, rank_of, stages):
    assert placement.rank_of == rank_of
    assert (placement.num_ranks, placement.num_stages) == (len(stages), len(rank_of))
    assert [placement.stages_of(rank) for rank in range(len(stages))] == stages


def test_other_end():
    ends = {
        Action(Kind.SEND_FORWARD, 2, 7): Action(Kind.RECV_FORWARD, 3, 7),
        Action(Kind.SEND_BACKWARD, 2, 7): Action(Kind.RECV_BACKWARD, 1, 7),
    }
    for send, receive in ends.items():
        assert other_end(send) == receive and other_end(receive) == send


def test_peers_and_edges_go_round_the_ring():
    schedule = interleaved(3, 2, 4)
    forward = Action(Kind.FORWARD, 2, 1)  # on the last rank; the next stage is on the first
    send = schedule.send_after(forward)
    assert send == Action(Kind.SEND_FORWARD, 2, 1) and schedule.peer(send) == 0
    receive = schedule.receive_before(Action(Kind.BACKWARD, 2, 1))
    assert receive == Action(Kind.RECV_BACKWARD, 2, 1) and schedule.peer(receive) == 0
    assert schedule.receive_before(Action(Kind.FORWARD, 0, 1)) is None, "the first stage reads the batch"
    assert schedule.send_after(Action(Kind.FORWARD, 5, 1)) is None, "the last stage has the loss"
    assert schedule.send_after(Action(Kind.BACKWARD, 0, 1)) is None
    assert schedule.receive_before(Action(Kind.BACKWARD, 5, 1)) is None


def test_the_turn_of_the_v_stays_on_its_rank():
    schedule = zb_v(3, 5)
    assert schedule.send_after(Action(Kind.FORWARD, 2, 0)) is None
    assert schedule.receive_before(Action(Kind.FORWARD, 3, 0)) is None
    assert schedule.send_after(Action(Kind.INPUT_GRAD, 3, 0)) is None
    assert schedule.receive_before(Action(Kind.INPUT_GRAD, 2, 0)) is None
    assert schedule.send_after(Action(Kind.INPUT_GRAD, 4, 0)) == Action(Kind.SEND_BACKWARD, 4, 0)
    assert schedule.peer(Action(Kind.SEND_BACKWARD, 4, 0)) == 2
    assert schedule.send_after(Action(Kind.WEIGHT_GRAD, 4, 0)) is None, "nobody waits for it"


def test_nothing_crosses_a_single_rank():
    schedule = interleaved(1, 3, 4)
    assert all(schedule.send_after(a) is None and schedule.receive_before(a) is None for a in schedule.actions[0])


def test_text():
    assert str(Action(Kind.SEND_BACKWARD, 3, 12)) == "SB12@3"
    assert " ".join(map(str, one_f_one_b(3, 4).actions[1])) == "F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1"
