"""The Pareto front: that of all exact figures, although few of them are computed."""

import dataclasses

import numpy as np
import pytest

from megatron.planner.search.front import find_front, layout_front, pareto
from megatron.planner.search.search import search
from megatron.planner.time.hardware import GIB
from tests.unit.planner.search.test_search import Trusting, planner_and_space


def brute_force(points):
    """Points that no other one equals or beats in both figures; of equal points the first."""
    return [
        number
        for number, point in enumerate(points)
        if not any(
            (other <= point).all() and ((other < point).any() or before < number)
            for before, other in enumerate(points)
            if before != number
        )
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pareto(seed):
    points = np.random.default_rng(seed).integers(0, 12, size=(60, 2)).astype(float)
    assert sorted(pareto(points).tolist()) == brute_force(points)
    assert (np.diff(points[pareto(points), 0]) > 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_that_of_all_exact_figures(seed):
    random = np.random.default_rng(seed)
    exact = random.uniform(1, 2, size=(400, 2))
    exact[7] = np.inf  # a candidate that cannot run, as only its exact figures say
    bounds = np.where(np.isfinite(exact), exact, 1.0) * random.uniform(0.95, 1, size=exact.shape)
    tightened, asked = [], []

    def tighten(numbers):
        for number in numbers:
            tightened.append(number)
            like = np.arange(number - number % 4, number - number % 4 + 4)
            yield like, 0.999 * exact[like, 0]

    def evaluate(numbers):
        asked.extend(numbers)
        return [tuple(exact[number]) for number in numbers]

    front = find_front(bounds, {3: tuple(exact[3])}, tighten, evaluate)
    assert list(front.numbers) == pareto(exact).tolist()
    assert len(set(asked)) == len(asked) < 50 and len(set(tightened)) == len(tightened) < 100 and 3 not in asked


@pytest.mark.parametrize("name", ["one node", "small memory", "experts"])
def test_it_is_what_searches_with_less_memory_find(name):
    """At ten amounts of memory; with copies of activations and of the optimizer's state, and few bytes of host
    memory."""
    fixed = {"offload": (0.0, 0.5, 1.0), "optimizer_offload": (0.0, 1.0), "micro_batch": (1, 2)}
    planner, candidates = planner_and_space(name, memory=12, kind=Trusting, **fixed)
    planner.cluster = dataclasses.replace(planner.cluster, host_memory=20 * GIB)
    front = layout_front(planner, search(planner, candidates), planner.limit)
    found = {}
    for gib in (3, 4, 4.5, 5, 5.5, 6, 6.5, 7.5, 9, 12):
        within = [front.exact[number][0] for number in front.numbers if front.exact[number][1] <= gib * GIB]
        smaller, _ = planner_and_space(name, memory=gib, kind=Trusting, **fixed)
        smaller.cluster = dataclasses.replace(smaller.cluster, host_memory=20 * GIB)
        best = search(smaller, candidates, 1).best
        found[gib] = [each.seconds for each in best]
        assert found[gib] == pytest.approx(within[:1], rel=1e-9), gib
    assert not all(found.values()) and len({seconds[0] for seconds in found.values() if seconds}) > 4, found
