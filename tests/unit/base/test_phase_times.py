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
    """Stays in "step", with a second of "train" after each."""
    for stay in seconds:
        times.change("step")
        clock[0] += stay
        times.change("train")
        clock[0] += 1.0


def test_the_first_stays_give_no_limit(clock):
    times = PhaseTimes("train", warmup=3)
    steps(times, clock, 60.0, 2.0, 2.0)
    assert times.limit("step") is None and times.longest("step") is None
    steps(times, clock, 4.0)
    assert (times.longest("step"), times.limit("step")) == (4.0, 20.0)  # the minute of the first step does not count


def test_a_limit_has_a_floor(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 0.1)
    assert times.limit("step") == 10.0


def test_each_phase_has_its_own(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 3.0, 5.0)
    assert times.limit("step") == 25.0 and times.limit("train") == 10.0 and times.limit("save-checkpoint") is None


def test_an_old_stay_is_forgotten(clock):
    times = PhaseTimes("train", warmup=0)
    steps(times, clock, 100.0, *[4.0] * RECENT)
    assert times.limit("step") == 20.0


def test_the_current_stay_is_known(clock):
    times = PhaseTimes("train")
    times.change("step")
    assert (times.phase, times.since) == ("step", 100.0)
