"""Timers: what is timed, when the device is waited for, and the printed block."""

import time

import pytest

from megatron.training.logging.timers import Timers, format_timers, slowest


class Device:
    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.mark.alone
def test_times_add_up_until_taken():
    timers = Timers(1, Device().synchronize)
    for _ in range(2):
        with timers("outer", level=1):
            with timers("inner", level=1):
                time.sleep(0.005)
    taken = timers.take()
    assert list(taken) == ["inner", "outer"]
    assert 0.01 <= taken["inner"] <= taken["outer"] < 1.0
    assert timers.take() == {}
    with timers("outer", level=1):
        pass
    assert 0.0 <= timers.take()["outer"] < 0.005


@pytest.mark.parametrize(
    ("level", "names", "waits"), [(0, ["save"], 0), (1, ["save", "step"], 2), (2, ["save", "step", "part"], 4)]
)
def test_the_level_says_what_is_timed_and_waited_for(level, names, waits):
    device = Device()
    timers = Timers(level, device.synchronize)
    for name, needs in (("save", 0), ("step", 1), ("part", 2)):
        with timers(name, level=needs):
            pass
    assert list(timers.take()) == names
    assert device.waits == waits


def test_a_timer_that_is_off_makes_nothing():
    timers = Timers(0, Device().synchronize)
    assert timers("a", level=1) is timers("b", level=2)


def test_a_failing_block_is_not_counted_and_can_run_again():
    device = Device()
    timers = Timers(1, device.synchronize)
    with pytest.raises(RuntimeError, match="first"):
        with timers("part", level=1):
            raise RuntimeError("first")
    assert device.waits == 1 and timers.take() == {}
    with timers("part", level=1):
        pass
    assert list(timers.take()) == ["part"]


def test_a_timer_does_not_nest_in_itself():
    timers = Timers(1, Device().synchronize)
    with pytest.raises(AssertionError, match="part is already running"):
        with timers("part", level=1), timers("part", level=1):
            pass


def test_block_over_ranks():
    first = {"forward-backward": 2.0, "forward-send": 0.5}
    last = {"forward-backward": 1.0, "optimizer": 0.25}
    assert format_timers([first, last], iterations=10) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (100.00, 200.00)\n"
        "    forward-send ...................................: (50.00, 50.00)\n"
        "    optimizer ......................................: (25.00, 25.00)"
    )


def test_no_times_no_block():
    assert format_timers([{}, {}]) == ""


def test_the_slowest_rank_of_each_part():
    ranks = [{"forward-backward": 2.0, "optimizer": 0.5}, {"forward-backward": 3.0}]
    assert slowest(ranks, iterations=2) == {"forward-backward": 1.5, "optimizer": 0.25}
    assert slowest([], iterations=2) == {}
