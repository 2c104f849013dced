"""What a pipeline rank holds at most, counted tensor by tensor, beside the closed form; and what it waits for."""

import pytest
import torch

from megatron.core.offload.copy_engine import WAIT, CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import ByRatio
from megatron.core.pipeline_parallel.engine import PipelineEngine
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline, write_chrome_trace
from megatron.schedule.costs import Costs
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import schedule_or_default
from megatron.schedule.simulate import simulate
from tests.unit.offload.closed_form import peak_chunks
from tests.unit.offload.live_bytes import LiveBytes
from tests.unit.offload.stages import LAYER_BYTES, Program, Stages
from tests.unit.pipeline_parallel.rank_threads import Mail, in_threads

CPU = torch.device("cpu")


def schedule_of(p, v, m, name=None):
    return with_offload(with_transfers(schedule_or_default(name, v).build(p, m, v=v), overlap=True))


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_peak_bytes_are_those_of_the_closed_form(p, v, ratio):
    layers, m = 4, 2 * p
    schedule, mail = schedule_of(p, v, m), Mail()

    def peak(rank):
        stages = Stages(
            schedule, rank, layers, ByRatio(ratio), CopyEngine(Streams(CPU, Timeline(CPU))), HostPool(pinned=False)
        )
        program, live = Program(stages), LiveBytes()
        with live:
            PipelineEngine(schedule, rank, program, mail.box(rank), torch.float32, program, stages.offload).run()
        stages.offload.end_step()
        assert live.now < 1000
        return live.peak

    for rank, found in enumerate(in_threads(peak, p)):
        expected = peak_chunks(p, v, rank, ratio, layers) * layers * LAYER_BYTES
        assert found == pytest.approx(expected, rel=0.02), f"rank {rank}"


class Clock:
    """Time of a rank, spent by computations and waits."""

    def __init__(self, seconds):
        self.now, self._seconds = 0.0, seconds

    def spend(self, kind):
        self.now += self._seconds[kind]


class ClockTimeline(Timeline):
    def __init__(self, clock):
        super().__init__(CPU)
        self._clock = clock

    def now(self):
        return self._clock.now


class ClockEngine:
    """Copies at `rate` bytes per second in each direction: data is there at once, and is waited for until it would
    be."""

    def __init__(self, clock, timeline, rate):
        self._clock, self._timeline, self._rate = clock, timeline, rate
        self._free = {"offload": 0.0, "reload": 0.0}

    def to_host(self, name, pairs, block):
        return self._start("offload", name, pairs)

    def to_device(self, name, pairs, block):
        return self._start("reload", name, pairs)

    def _start(self, row, name, pairs):
        start = max(self._clock.now, self._free[row])
        stop = self._free[row] = start + sum(source.numel() for source, _ in pairs) / self._rate
        for source, destination in pairs:
            destination.copy_(source)
        self._timeline.keep(row, name, start, stop)
        return ClockWork(self._clock, self._timeline, name, stop)


class ClockWork:
    def __init__(self, clock, timeline, name, stop):
        self._clock, self._timeline, self._name, self._stop = clock, timeline, name, stop

    def wait(self):
        if self._stop > self._clock.now + 1e-9:
            self._timeline.keep(WAIT, self._name, self._clock.now, self._stop)
            self._clock.now = self._stop


class ClockBox:
    """Messages carry the time at which they were sent."""

    def __init__(self, mail, rank, clock):
        self._mail, self._rank, self._clock, self._asked = mail, rank, clock, {}

    def send(self, tensor, peer, name):
        self._mail.put((self._rank, peer), (tensor.clone(), self._clock.now))

    def receive(self, shape, dtype, peer, name):
        line = (peer, self._rank)
        self._asked[line] = self._asked.get(line, -1) + 1
        return ClockMessage(self._mail, line, self._asked[line], self._clock)

    def flush(self):
        pass


class ClockMessage:
    def __init__(self, mail, line, number, clock):
        self._mail, self._line, self._number, self._clock = mail, line, number, clock

    def take(self):
        tensor, sent = self._mail.take(self._line, self._number)
        self._clock.now = max(self._clock.now, sent)
        return tensor


def played(schedule, ratio, rate, layers=2):
    """(spans of each rank, when each is done) under a clock: a forward takes a second, a backward two."""
    mail = Mail()

    def play(rank):
        clock = Clock({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
        timeline = ClockTimeline(clock)
        timeline.start()
        engine = ClockEngine(clock, timeline, rate)
        stages = Stages(schedule, rank, layers, ByRatio(ratio), engine, HostPool(pinned=False), clock.spend)
        program = Program(stages, clock.spend)
        box = ClockBox(mail, rank, clock)
        PipelineEngine(schedule, rank, program, box, torch.float32, program, stages.offload).run()
        done = clock.now
        stages.offload.end_step()
        return timeline.stop(), done

    spans, done = zip(*in_threads(play, schedule.placement.num_ranks), strict=True)
    return spans, done


@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 4, 1), ("interleaved", 2, 2), ("zb-h1", 4, 1), ("gpipe", 3, 1)])
@pytest.mark.parametrize("slots", [0.5, 1.0, 2.5])
def test_nobody_waits_for_a_copy_that_fits_its_slot(name, p, v, slots, tmp_path):
    """A copy takes `slots` forwards. The engine's times are the simulator's, and a wait is on the trace."""
    layers, ratio = 2, 0.5
    schedule = schedule_of(p, v, 2 * p, name)
    spans, done = played(schedule, ratio, ratio * layers * LAYER_BYTES / slots)
    waits = [span for rank in spans for span in rank if span.row == WAIT]
    assert bool(waits) == (slots > 1.0)
    assert any(span.row == "reload" for rank in spans for span in rank)
    costs = Costs.uniform(schedule.placement.num_stages, offload=slots, reload=slots)
    timeline = simulate(schedule, costs)
    assert done == pytest.approx([max(i.stop for i in timeline.computation(rank)) for rank in range(p)])
    without = simulate(
        with_transfers(schedule_or_default(name, v).build(p, 2 * p, v=v), overlap=True), Costs.uniform(p * v)
    )
    assert (timeline.makespan > without.makespan + 1e-9) == bool(waits)
    write_chrome_trace(tmp_path / "trace.json", spans)
    assert (WAIT in (tmp_path / "trace.json").read_text()) == bool(waits)
