"""Following bytes through a list of events."""

from megatron.spec.memory.trace import MemoryTrace, Profile, profile_of


def test_the_peak_has_a_place():
    trace = MemoryTrace()
    with trace.doing("a"):
        trace.take("x", 5)
        with trace.doing("b"):
            trace.use("y", 7)
    trace.free("x", 2)
    assert (dict(trace.top), trace.moment, trace.now["x"]) == ({"x": 5, "y": 7}, "a: b", 3)


def test_a_profile_is_what_its_events_are():
    def work(trace):
        with trace.doing("inner"):
            trace.free("x", 3)
            trace.take("y", 4)
            trace.use("z", 2)

    apart, together = MemoryTrace(), MemoryTrace()
    for trace in (apart, together):
        trace.take("x", 3)
    with apart.doing("outer"):
        work(apart)
    with together.doing("outer"):
        together.replay(profile_of(work))
    assert +apart.now == +together.now == {"y": 4}
    assert apart.moment == together.moment == "outer: inner"
    assert sum(apart.top.values()) == sum(together.top.values()) == 6


def test_a_profile_below_the_peak_changes_nothing_about_it():
    trace = MemoryTrace()
    trace.use("x", 10)
    trace.replay(Profile({"y": 1}, {"y": 2}, "later", {}))
    assert dict(trace.top) == {"x": 10} and trace.now["y"] == 1
