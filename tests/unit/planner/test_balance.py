"""The Pareto front of what layers keep, against every combination."""

import itertools
import random

import pytest

from megatron.planner.memory.balance import Option, cheapest, front, not_beaten
from megatron.planner.memory.front_report import MIB, ROWS, draw, table

KEEP, NORM, MLP, FULL = (
    Option("none", 100, 0.0),
    Option("norm", 80, 1.0),
    Option("mlp", 30, 6.0),
    Option("full", 10, 9.0),
)


def every_choice(layers):
    return [(sum(o.nbytes for o in each), sum(o.seconds for o in each)) for each in itertools.product(*layers)]


def best(layers, budget):
    """The least time of all combinations."""
    return min((seconds for nbytes, seconds in every_choice(layers) if nbytes <= budget), default=None)


@pytest.mark.parametrize("seed", range(5))
def test_as_good_as_every_combination(seed):
    """Layers of different options; sizes below the front's resolution, so it is exact."""
    random_ = random.Random(seed)
    layers = [
        [Option(str(n), random_.randrange(1, 60), random_.random()) for n in range(random_.randrange(1, 5))]
        for _ in range(5)
    ]
    choices = front(layers)
    for budget in range(0, 300, 7):
        found = cheapest(choices, budget)
        assert (None if found is None else found.seconds) == pytest.approx(best(layers, budget))
    for choice in choices:
        assert choice.nbytes == sum(option.nbytes for option in choice.options)
        assert choice.seconds == pytest.approx(sum(option.seconds for option in choice.options))
        assert all(option in options for option, options in zip(choice.options, layers, strict=True))


def test_front_falls_in_bytes_and_rises_in_time():
    choices = front([[KEEP, NORM, MLP, FULL]] * 12)
    assert (choices[0].nbytes, choices[0].seconds) == (1200, 0.0) and choices[-1].nbytes == 120
    assert all(a.nbytes > b.nbytes and a.seconds < b.seconds for a, b in itertools.pairwise(choices))


def test_many_layers_stay_close_to_the_best():
    """80 layers: a mixture of the two options on either side of the budget is a bound from below."""
    keep, full = Option("none", 1_000_003, 0.0), Option("full", 100_019, 1.0)
    choices = front([[keep, full]] * 80)
    budget = 40_000_000
    found = cheapest(choices, budget)
    needed = (80 * keep.nbytes - budget) / (keep.nbytes - full.nbytes)
    assert needed <= found.seconds <= needed + 1
    assert found.counts() == {"none": 80 - int(found.seconds), "full": int(found.seconds)} and found.nbytes <= budget


def test_options_that_another_beats_are_never_taken():
    slower = Option("slower", 100, 2.0)
    assert not_beaten([slower, KEEP, Option("twin", 100, 0.0), FULL]) == [KEEP, FULL]
    assert all("slower" not in choice.counts() for choice in front([[slower, KEEP, FULL]] * 3))


def test_nothing_fits():
    choices = front([[KEEP, FULL]] * 3)
    assert cheapest(choices, 29) is None and cheapest(choices, 30).counts() == {"full": 3}


def test_table_shows_both_ends_and_marks_the_choice():
    choices = front([[KEEP, NORM, MLP, FULL]] * 12)
    chosen = cheapest(choices, 700)
    lines = table(choices, chosen, 700, base_seconds=120.0)[1:]
    assert len(lines) <= ROWS and "12 x none" in lines[0] and "12 x full" in lines[-1]
    (marked,) = [line for line in lines if "budget" in line]
    assert f"{chosen.seconds / 120:.1%}" in marked and f"{chosen.nbytes / MIB:.1f}" in marked


def test_picture(tmp_path):
    choices = front([[KEEP, FULL]] * 3)
    draw(tmp_path / "new" / "front.png", choices, choices[1], 250, 30.0)
    assert (tmp_path / "new" / "front.png").read_bytes().startswith(b"\x89PNG")
