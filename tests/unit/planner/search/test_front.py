"""The Pareto front: that of all exact figures, although few of them are computed."""

import numpy as np
import pytest

from megatron.planner.search.front import find_front, pareto


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
    bounds = exact * random.uniform(0.95, 1, size=exact.shape)
    asked = []

    def evaluate(numbers):
        asked.extend(numbers)
        return [tuple(exact[number]) for number in numbers]

    front = find_front(bounds, {3: tuple(exact[3])}, evaluate, most=400)
    assert front.complete and list(front.numbers) == pareto(exact).tolist()
    assert len(set(asked)) == len(asked) < 100 and 3 not in asked


def test_it_asks_for_no_more_than_it_may():
    exact = np.random.default_rng(1).uniform(1, 2, size=(400, 2))
    front = find_front(0.5 * exact, {}, lambda numbers: [tuple(exact[n]) for n in numbers], most=7)
    assert len(front.exact) == 7 and not front.complete and set(front.numbers) <= set(front.exact)
