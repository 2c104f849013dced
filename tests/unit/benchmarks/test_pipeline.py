"""The arithmetic of the table of pipeline messages."""

import pytest

from benchmarks.cluster.pipeline import HEADER, WAYS, WORKER, Row, busiest, line, simulated_exposure
from benchmarks.cluster.pipeline_worker import __name__ as worker
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES


def schedule_of(way, m):
    name, v, groups = WAYS[way]
    return with_transfers(SCHEDULES[name].build(2, m, v=v, group=groups and 2 * groups), overlap=True)


def test_ways():
    assert worker == WORKER
    # What the worker builds from a case's name alone.
    assert all(v == (SCHEDULES[name].virtual_stages or 2) for name, v, _ in WAYS.values())


@pytest.mark.parametrize(("way", "messages"), [("1f1b", 1), ("interleaved, v = 2", 3), ("zb-v", 2)])
def test_messages_of_the_busier_direction(way, messages):
    assert busiest(schedule_of(way, 8)) == 8 * messages


def test_1f1b_on_two_ranks_exposes_a_message_a_microbatch_and_zero_bubble_none():
    """Those of the ends aside, which do not grow."""
    one = [simulated_exposure(schedule_of("1f1b", m), 0.06, 0.036) for m in (8, 16)]
    assert one == pytest.approx([8, 16])
    for way in ("zb-v", "interleaved, groups of 2 p"):
        few, many = (simulated_exposure(schedule_of(way, m), 0.03, 0.012) for m in (8, 16))
        assert few == pytest.approx(many) and 0 < few < 6


def test_line():
    row = Row(2, 8, "zb-v", 466.0, 0.2, step=1.6, free=1.5, message=0.02, exposed=4.0, simulated=5.0)
    assert line(row).split()[:4] == ["2", "8", "466", "20%"]
    assert line(row).split()[-3:] == ["4.00", "5.00", "5.0%"]
    assert len(line(row)) == len(HEADER)
