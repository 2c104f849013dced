"""The runner of campaigns itself: cases depend on their seed alone, and a failure shrinks to its smallest case."""

import random
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign, Failure, case_of, expect_none_fails, main, run


def _numbers(limit: int) -> Campaign[tuple[int, ...]]:
    """Cases are lists of numbers; those with a number above the limit fail."""

    def check(case: tuple[int, ...], folder: Path) -> str:
        assert not list(folder.iterdir())
        (folder / "left").touch()
        if any(number > limit for number in case):
            raise Failure(f"{max(case)} is above {limit}")
        return "fine"

    def simpler(case: tuple[int, ...]):
        for i in range(len(case)):
            yield case[:i] + case[i + 1 :]
        for i, number in enumerate(case):
            if number > 0:
                yield (*case[:i], number - 1, *case[i + 1 :])

    def draw(rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(10) for _ in range(4))

    return Campaign("numbers", draw, check, simpler, lambda case: f"see {case}")


def test_a_case_depends_on_seed_and_number_alone():
    campaign = _numbers(9)
    assert [case_of(campaign, 3, i) for i in range(5)] == [case_of(campaign, 3, i) for i in range(5)]
    assert len({case_of(campaign, seed, i) for seed in range(3) for i in range(5)}) > 10


def test_a_failure_shrinks_to_its_smallest_case():
    counts, found = run(_numbers(6), 1, range(20), shrink_tries=200)
    assert found and counts["failed"] == len(found) and counts.total() == 20
    assert {failure.smallest for failure in found} == {(7,)}
    assert found[0].message == "7 is above 6"


def test_shrinking_keeps_to_its_tries():
    _, found = run(_numbers(6), 1, range(20), shrink_tries=0)
    assert all(failure.smallest == failure.case for failure in found)


def test_the_command_line_says_what_failed_and_how_to_see_it(capsys):
    with pytest.raises(SystemExit) as end:
        main(_numbers(6), ["--seed", "1", "--cases", "20"])
    assert end.value.code == 1
    assert "to see it: see (7,)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(_numbers(9), ["--seed", "1", "--cases", "5"])
    assert end.value.code == 0


def test_an_unexpected_exception_is_a_failure():
    def check(case: int, folder: Path) -> str:
        return str(1 // (case - case))

    campaign = Campaign("broken", lambda rng: 1, check, lambda case: [], str)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        expect_none_fails(campaign, 1, 1)
