"""Better hardware, and layouts that differ in one flag."""

import numpy as np
import pytest

from megatron.planner.search.explain import differences, gains, neighbours
from megatron.planner.search.layout import Candidates, Layout
from megatron.planner.time.hardware import BF16, built_in


def test_each_resource_is_faster_alone():
    cluster = built_in("h100:2x8")
    asked = []

    def seconds_on(changed):
        asked.append(changed)
        device = changed.device
        return (
            1e15 / device.flops(BF16)
            + 1e12 / device.bandwidth
            + 1e9 / device.link
            + 1e11 / changed.network
            + 1e8 / changed.host
        )

    found = gains(seconds_on, cluster)
    seconds = {gain.resource: gain.seconds for gain in found}
    now = seconds_on(cluster)
    assert [gain.seconds for gain in found] == sorted(seconds.values()) and all(s < now for s in seconds.values())
    assert found[0].resource == "network" and now - found[0].seconds == pytest.approx(2 - 2 / 1.1)
    assert asked[0].device.share(BF16) == cluster.device.share(BF16)


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="interleaved", virtual_stages=4),
    Layout(micro_batch=2),
    Layout(tp=2, micro_batch=2),
]
EXACT = [5.0, 4.5, 6.0, 3.0, 4.0, 5.5, 1.0]


class TestNeighbours:
    def found(self, seconds=tuple(EXACT), number=0):
        candidates = Candidates.of(LAYOUTS)
        asked = []

        def evaluate(numbers):
            asked.extend(numbers)
            return [seconds[each] for each in numbers]

        by_axis = {each.axis: each for each in neighbours(candidates, number, np.array(EXACT) * 0.9, evaluate)}
        return by_axis, asked

    def test_one_flag_differs_where_the_rules_allow_it(self):
        by_axis, asked = self.found()
        assert by_axis["tp"].layout == LAYOUTS[1] and by_axis["tp"].changed == ("tp",)
        assert by_axis["micro_batch"].layout == LAYOUTS[5], "not the faster one, in which tp differs, too"
        assert 2 not in asked, "its bound is not below the exact time of another"

    def test_other_flags_follow_where_they_must(self):
        by_axis, _ = self.found()
        assert by_axis["pp"].layout == LAYOUTS[3] and by_axis["pp"].seconds == 3.0
        assert by_axis["pp"].changed == ("pp", "schedule", "virtual_stages")

    def test_layouts_that_do_not_fit_are_no_neighbours(self):
        never = float("inf")
        by_axis, _ = self.found((5.0, never, 6.0, never, never, 5.5, 1.0))
        assert by_axis["tp"].layout == LAYOUTS[2] and by_axis["pp"].layout is None

    def test_layouts_that_differ_in_several_axes_are_listed_once(self):
        assert set(self.found()[0]) == {"tp", "pp", "micro_batch"}


def test_differences():
    assert differences({"a": 1.0, "b": 2.0}, {"b": 5.0, "c": 0.5}) == [("b", 3.0), ("a", -1.0), ("c", 0.5)]
