"""The rule for suspicious numbers of a step, and what checkpoints keep of it."""

import json
import math

import pytest

from megatron.base.mesh import Mesh
from megatron.training.other_replica import rank_at, replica_distance
from megatron.training.result_rule import FACTOR, STEPS, ResultRule, difference
from megatron.training.result_state import ResultState, UnresolvedStep

RANKS = (2.0, 1.0, 0.0)


def rule(state, checked=(True, True, True), finite=(True, True, True), *, exact=True):
    return ResultRule(state, checked, finite, exact=exact)


def kinds(suspects):
    return [suspect.kind for suspect in suspects]


def test_a_number_is_compared_with_the_first_steps():
    state = ResultState()
    of_run = rule(state)
    for step in range(STEPS):
        assert of_run.suspects((1e9, 1e9, 1e9), RANKS) == []
        of_run.learn((2.0 + step / STEPS, 1.0, 0.5))
    limit = FACTOR * state.largest[0]
    assert of_run.suspects((limit * 0.999, 9.99, 4.99), RANKS) == []
    (suspect,) = of_run.suspects((limit, 9.99, 4.99), RANKS)
    assert (suspect.kind, suspect.value, suspect.rank) == (0, limit, 2) and "at least 10 times 2.99" in suspect.why
    assert kinds(of_run.suspects((0.0, 10.0, 5.0), RANKS)) == [1, 2]
    assert kinds(rule(state, checked=(True, False, False)).suspects((limit, 10.0, 5.0), RANKS)) == [0]
    of_run.learn((1e6, 1e6, 1e6))  # behind the first steps nothing is learned
    assert state.largest == pytest.approx((2.99, 1.0, 0.5))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_suspicious_in_the_first_step(value):
    state = ResultState()
    assert kinds(rule(state, checked=(False,) * 3).suspects((1.0, value, value), RANKS)) == [1, 2]
    assert rule(state, finite=(True, False, False)).suspects((1.0, value, value), RANKS) == []
    rule(state).learn((1.0, value, 2.0))
    assert state.largest == (1.0, 0.0, 2.0)


def test_differences_of_computations():
    assert difference(2.0, 1.0) == difference(1.0, 2.0) == 0.5
    assert difference(math.nan, math.nan) == difference(math.inf, math.inf) == difference(0.0, -0.0) == 0.0
    assert difference(math.nan, 1.0) == difference(math.inf, 1.0) == difference(math.inf, math.nan) == math.inf


def test_the_tolerance_is_megatrons_or_what_was_measured():
    state = ResultState()
    exact, loose = rule(state), rule(state, exact=False)
    first, second = (1.0, 1.0, 1.0), (1.0 + 1e-15, 1.0005, 1.0015)
    assert exact.differing(first, second) == [0, 1, 2]
    assert loose.differing(first, second) == exact.differing(first, second, elsewhere=True) == [2]
    assert loose.note_noise(first, (0.999, 1.0, 0.99)) == pytest.approx([1e-3, 0.0, 1e-2])
    assert loose.differing(first, (1.0015, 1.0015, 1.015)) == [1]
    assert exact.differing(first, (1.0, 1.0001, 1.0)) == [1]


def test_the_state_goes_through_json():
    step = UnresolvedStep(7, "tp 1, dp 2", 1, "node-2, GPU 3", tuple(x.hex() for x in (math.inf, math.nan, 0.1)))
    state = ResultState(3, (1.0, 2.0, 3.0), (0.0, 0.1, 0.0), (5, 9), step)
    back = ResultState.of(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
    assert back == state
    assert back.unresolved.numbers[::2] == [math.inf, 0.1] and math.isnan(back.unresolved.numbers[1])
    assert ResultState.of(None) == ResultState()  # of a checkpoint from before


def test_planned_iterations_replace_those_to_come():
    state = ResultState(left_out=(2, 8))
    state.plan(None, done=5)
    assert state.left_out == (2, 8)
    state.plan((6, 7, 2), done=5)
    assert state.left_out == (2, 6, 7)


@pytest.mark.parametrize(
    ("mesh", "experts", "distance"),
    [
        (Mesh.create(1), False, None),
        (Mesh.create(4, tp=4), False, None),
        (Mesh.create(4, tp=2), False, 1),
        (Mesh.create(8, tp=2, pp=2), False, 1),
        (Mesh.create(4, ep=2), True, 2),
        (Mesh.create(4, ep=4), True, None),
        (Mesh.create(8, tp=2, ep=2), True, 2),
        (Mesh.create(8, tp=2, ep=2, etp=1), True, 1),
        (Mesh.create(6, tp=2, ep=3, etp=1), True, None),  # experts of one and a half replicas
    ],
)
def test_how_far_away_another_replica_is(mesh, experts, distance):
    assert replica_distance(mesh, experts=experts) == distance
    for rank in range(mesh.world_size if distance else 0):
        other = rank_at(mesh, rank, distance)
        here, there = mesh.coordinates(rank), mesh.coordinates(other)
        assert other != rank and there["dp"] == (here["dp"] + distance) % mesh.dp
        assert all(here[axis] == there[axis] for axis in ("tp", "cp", "pp", "etp", "ep"))
        assert rank_at(mesh, other, -distance) == rank
