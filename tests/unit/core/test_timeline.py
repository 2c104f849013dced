"""Spans, their order within a row, and the trace file."""

import json
import time

import pytest
import torch

from megatron.core.timeline import FinishedSpan, Stopwatch, Timeline, in_sequence, write_chrome_trace

CPU = torch.device("cpu")


class TestRecording:
    def test_nothing_is_kept_outside(self):
        timeline = Timeline(CPU)
        assert timeline.begin("compute", "early") is None
        with timeline.span("compute", "early"):
            pass
        timeline.start()
        assert timeline.stop() == []

    def test_spans_by_start_with_their_lengths(self):
        timeline = Timeline(CPU)
        timeline.start()
        outer = timeline.begin("all-gather", "bucket 1")
        with timeline.span("compute", "forward 0"):
            time.sleep(0.02)
        outer.end()
        first, second = timeline.stop()
        assert (first.row, first.name) == ("all-gather", "bucket 1")
        assert (second.row, second.name) == ("compute", "forward 0")
        assert 0 <= first.start <= second.start < second.stop <= first.stop < 5
        assert second.stop - second.start >= 0.02

    def test_what_ends_late_or_never_is_left_out(self):
        timeline = Timeline(CPU)
        timeline.start()
        late, never = timeline.begin("step", "late"), timeline.begin("step", "never")
        assert timeline.stop() == []
        late.end()
        assert timeline.stop() == [] and never is not None

    def test_some_rows(self):
        timeline = Timeline(CPU)
        timeline.start(("wait ", "phase"))
        for row in ("wait tp", "compute", "phase", "all-reduce"):
            with timeline.span(row, "one"):
                pass
        recording = timeline.close()
        assert not timeline.recording and timeline.begin("phase", "late") is None
        assert [span.row for span in recording.read()] == ["wait tp", "phase"]
        timeline.start()
        assert timeline.begin("compute", "one") is not None

    def test_a_second_recording_begins_anew(self):
        timeline = Timeline(CPU)
        for name in ("one", "two"):
            timeline.start()
            with timeline.span("step", name):
                pass
            assert [span.name for span in timeline.stop()] == [name]


def test_transfers_in_flight_together_are_shown_one_after_the_other():
    flying = [FinishedSpan("all-gather", "b", 0.1, 0.5), FinishedSpan("all-gather", "a", 0.0, 0.2)]
    flying.append(FinishedSpan("all-gather", "c", 0.7, 0.8))
    shown = in_sequence(flying)
    assert [(span.name, span.start, span.stop) for span in shown] == [
        ("a", 0.0, 0.2),
        ("b", 0.2, 0.5),
        ("c", 0.7, 0.8),
    ]


def test_trace(tmp_path):
    ranks = [
        [FinishedSpan("compute", "forward 0", 0.0, 1.0), FinishedSpan("all-gather", "bucket 0", 0.5, 2.0)],
        [FinishedSpan("compute", "forward 0", 0.25, 1.0)],
    ]
    path = tmp_path / "new" / "trace.json"
    write_chrome_trace(path, ranks)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [(e["pid"], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [
        (0, "compute", "forward 0", 0.0, 1e6),
        (0, "all-gather", "bucket 0", 5e5, 1.5e6),
        (1, "compute", "forward 0", 2.5e5, 7.5e5),
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]


class Device:
    """A CUDA device that is `behind` seconds late: it passes an event that long after the host has recorded it."""

    def __init__(self, behind):
        self.now, self.behind = 0.0, behind

    def event(self, *, enable_timing):
        assert enable_timing
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device):
        self._device = device

    def record(self):
        self.at = self._device.now + self._device.behind

    def query(self):
        return self._device.now >= self.at

    def elapsed_time(self, later):
        assert later.query(), "the host would wait for the device"
        return 1e3 * (later.at - self.at)


class TestStopwatch:
    def test_the_host_answers_at_once(self):
        watch = Stopwatch(CPU)
        assert watch.stop() is None
        for _ in range(2):
            watch.start()
            time.sleep(0.02)
            assert 0.02 <= watch.stop() < 5

    @pytest.mark.parametrize("behind", [0.0, 1.5, 7.0])
    def test_the_device_is_never_waited_for(self, behind, monkeypatch):
        """Intervals of 1, 2, 3, ... seconds, with a second between them, on a device that is late: each is told in
        turn."""
        device = Device(behind)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        watch, seen, ends = Stopwatch(torch.device("cuda")), [], []
        for seconds in range(1, 8):
            watch.start()
            device.now += seconds
            ends.append(device.now)
            over = [number for number, end in enumerate(ends, 1) if end + behind <= device.now]
            seen.append((watch.stop(), over[-1] if over else None))
            device.now += 1
        assert all(found == expected for found, expected in seen), seen
        assert (seen[0][0] is None) == (behind > 0) and seen[-1][0] is not None
