import pytest

from megatron.base import phase_times
from megatron.base.phase_times import RECENT, PhaseTimes


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(phase_times.time, "monotonic", lambda: now[0])
    return now


def steps(times, clock, *seconds):
    """Stays in "optimizer", with a second of "train" after each."""
    for stay in seconds:
        times.change("optimizer")
        clock[0] += stay
        times.change("train")
        clock[0] += 1.0


def test_the_first_stays_give_no_limit(clock):
    times = PhaseTimes("train", warmup=3)
    steps(times, clock, 60.0, 2.0, 2.0)
    assert times.limit("optimizer") is None and times.longest("optimizer") is None
    steps(times, clock, 4.0)
    assert (times.longest("optimizer"), times.limit("optimizer")) == (
        4.0,
        20.0,
    )  # the minute of the first step does not count


def test_a_limit_has_a_floor(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 0.1)
    assert times.limit("optimizer") == 10.0
    times.of_step -= {"optimizer"}
    assert times.limit("optimizer") == times.rare_floor == 600.0


def test_each_phase_has_its_own(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 3.0, 5.0)
    assert times.limit("optimizer") == 25.0 and times.limit("train") == 600.0
    assert times.limit("save-checkpoint") is None


def test_an_old_stay_is_forgotten(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 100.0, *[4.0] * RECENT)
    assert times.limit("optimizer") == 20.0


def test_the_current_stay_is_known(clock):
    times = PhaseTimes("train")
    times.change("optimizer")
    assert (times.phase, times.since) == ("optimizer", 100.0)
