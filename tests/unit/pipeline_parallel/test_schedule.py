"""Schedules as data: complete, in a possible order, and within the memory they promise."""

import pytest

from megatron.core.pipeline_parallel.schedule import Action, Kind, forward_only, one_forward_one_backward

SIZES = [(p, m) for p in range(1, 9) for m in [*range(1, 13), 16, 31, 32]]


def stages(p, m):
    return [one_forward_one_backward(stage, p, m) for stage in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
class TestOneForwardOneBackward:
    def test_each_action_once_and_in_order(self, p, m):
        for stage, actions in enumerate(stages(p, m)):
            assert all(action.stage == stage for action in actions)
            for kind in Kind:
                assert [a.microbatch for a in actions if a.kind is kind] == list(range(m))

    def test_forward_comes_first(self, p, m):
        for actions in stages(p, m):
            place = {(a.kind, a.microbatch): n for n, a in enumerate(actions)}
            assert all(place[Kind.FORWARD, i] < place[Kind.BACKWARD, i] for i in range(m))

    def test_memory(self, p, m):
        """At most p - stage microbatches are alive, and that many are."""
        for stage, actions in enumerate(stages(p, m)):
            alive = most = 0
            for action in actions:
                alive += 1 if action.kind is Kind.FORWARD else -1
                most = max(most, alive)
            assert alive == 0 and most == min(p - stage, m)

    def test_runs_without_deadlock_in_the_known_time(self, p, m):
        """Played with unit times: forwards wait for the stage before, backwards for the stage after."""
        queues = [list(actions) for actions in stages(p, m)]
        done: dict[Action, int] = {}
        time = 0
        while any(queues):
            started = []
            for queue in queues:
                if queue and all(done.get(need, time + 1) <= time for need in needs(queue[0], p)):
                    started.append(queue.pop(0))
            assert started or any(end > time for end in done.values()), f"stuck at {[str(q[0]) for q in queues if q]}"
            time += 1
            done.update(dict.fromkeys(started, time))
        assert time == 2 * (m + p - 1)


def needs(action, p):
    """What must be done before `action` can start."""
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, action.stage - 1, action.microbatch)] if action.stage else []
    found = [Action(Kind.FORWARD, action.stage, action.microbatch)]
    if action.stage < p - 1:
        found.append(Action(Kind.BACKWARD, action.stage + 1, action.microbatch))
    return found


def test_by_hand():
    assert " ".join(map(str, one_forward_one_backward(0, 1, 3))) == "F0 B0 F1 B1 F2 B2"
    assert " ".join(map(str, one_forward_one_backward(0, 3, 4))) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert " ".join(map(str, one_forward_one_backward(2, 3, 2))) == "F0 B0 F1 B1"
    assert " ".join(map(str, one_forward_one_backward(0, 8, 2))) == "F0 F1 B0 B1"


def test_forward_only():
    assert " ".join(map(str, forward_only(0, 3))) == "F0 F1 F2"
