"""The line of fixed choices that balanced recompute is compared with."""

import pytest

from benchmarks.recompute import on_the_line
from megatron.planner.memory.balance import Option

POINTS = [
    Option("none", 100, 0.0),
    Option("beaten", 90, 3.0),
    Option("parts", 60, 2.0),
    Option("beaten in both", 65, 9.0),
    Option("all", 20, 10.0),
]


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(120, 0.0), (100, 0.0), (80, 1.0), (60, 2.0), (50, 4.0), (20, 10.0), (19, None)]
)
def test_between_the_neighbours_that_nothing_beats(nbytes, seconds):
    found = on_the_line(POINTS, nbytes)
    assert found is None if seconds is None else found == pytest.approx(seconds)
