"""The automatic placement: what it chooses from numbers, and that a run follows its memory up and down."""

import pytest
import torch

from megatron.config.optimizer_offload import UPDATE, OffloadSettings
from megatron.core.device import PeakMeter
from megatron.core.optimizer.placement import Candidate, Rates, delay, place
from tests.parallel.strategies import make_run
from tests.unit.models.builds import CPU, LLAMA

SMALL = {**LLAMA, "num_layers": 1}
ON_CPU, ON_DEVICE = True, False


def chunks(count, seconds=1.0, slack=0.0, device_bytes=100):
    """Of one size; the n-th is read n x slack after the step."""
    return [Candidate(device_bytes, seconds, slack * n) for n in range(count)]


@pytest.mark.parametrize(
    ("on_cpu", "slack", "seconds"),
    [
        ([ON_DEVICE] * 4, 0.0, 0.0),
        ([ON_CPU] * 4, 0.0, 4.0),  # nothing hides
        ([ON_CPU] * 4, 1.0, 1.0),  # the first one is needed at once, and holds up all by its own time
        ([ON_DEVICE, ON_CPU, ON_CPU, ON_CPU], 1.0, 0.0),  # each is done when it is read
        ([ON_DEVICE, ON_CPU, ON_CPU, ON_CPU], 0.5, 1.5),
        ([ON_CPU, ON_DEVICE, ON_DEVICE, ON_CPU], 0.5, 1.0),
    ],
)
def test_delay(on_cpu, slack, seconds):
    assert delay(chunks(4, slack=slack), on_cpu) == seconds


@pytest.mark.parametrize(
    ("on_cpu", "free", "expected"),
    [
        ([ON_DEVICE] * 4, 1000, [ON_DEVICE] * 4),
        (
            [ON_DEVICE] * 4,
            299,
            [ON_DEVICE, ON_DEVICE, ON_DEVICE, ON_CPU],
        ),  # below the threshold of 300: as many as are missing
        ([ON_DEVICE] * 4, 150, [ON_DEVICE, ON_DEVICE, ON_CPU, ON_CPU]),
        ([ON_DEVICE] * 4, 0, [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU]),
        ([ON_DEVICE] * 4, -999, [ON_CPU] * 4),  # more cannot be done
        (
            [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU],
            600,
            [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU],
        ),  # 500 would stay free: less than twice the threshold
        ([ON_CPU] * 4, 699, [ON_CPU] * 4),
        ([ON_CPU] * 4, 700, [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU]),
        ([ON_CPU] * 4, 10_000, [ON_DEVICE] * 4),
    ],
)
def test_place(on_cpu, free, expected):
    assert place(chunks(4), on_cpu, free, threshold=300) == expected


def test_a_placement_stays_while_memory_stays():
    """Moving changes what is free by just what was moved; the second decision agrees with the first."""
    for free in range(-500, 2000, 37):
        for on_cpu in ([ON_DEVICE] * 6, [ON_CPU] * 6, [ON_DEVICE, ON_CPU, ON_DEVICE, ON_CPU, ON_CPU, ON_DEVICE]):
            after = place(chunks(6), on_cpu, free, threshold=300)
            moved = sum(100 * (new - old) for new, old in zip(after, on_cpu, strict=True))
            assert place(chunks(6), after, free + moved, threshold=300) == after


def test_hidden_work_stays_where_it_is():
    hidden = chunks(4, seconds=0.5, slack=1.0)
    assert place(hidden, [ON_CPU] * 4, 10_000, threshold=300) == [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU]
    assert delay(hidden, [ON_DEVICE, ON_CPU, ON_CPU, ON_CPU]) == 0.0


def test_size_is_not_what_decides():
    """The one that is needed last leaves, though a smaller and a larger one would do."""
    mixed = [Candidate(400, 4.0, 0.0), Candidate(10, 0.1, 1.0), Candidate(300, 3.0, 9.0)]
    assert place(mixed, [ON_DEVICE] * 3, 0, threshold=200) == [ON_DEVICE, ON_DEVICE, ON_CPU]


def test_rates():
    rates = Rates(to_host=400.0, to_device=200.0, update=10.0)
    assert rates.seconds(100, 200, overlap=False) == 1.0 + 10.0 + 1.0
    assert rates.seconds(100, 200, overlap=True) == 11.0


class Meter:
    """Free memory that a test sets: what is left when the CPU updates all, less the state on the device."""

    def __init__(self, run):
        self.empty, self._run = 0, run

    def free(self):
        near = [chunk for chunks in self._run.optimizer.chunks for chunk in chunks if not chunk.on_cpu]
        return self.empty - sum(chunk.nbytes for chunk in near)

    def reset(self):
        pass


def test_a_run_follows_its_memory_up_and_down():
    """Chunks come near when there is room, leave when activations grow, and return; no step shows it."""
    threshold = 20_000
    mode = OffloadSettings(mode=UPDATE, fraction=1.0, is_auto=True, chunk_size=1280, threshold=threshold)
    plain = make_run({}, fields=SMALL)
    run = make_run({}, fields=SMALL, offload=mode)
    owner = run.optimizer
    meter = owner._auto.meter = Meter(run)
    total = owner.cpu_chunks[1]
    state = owner.host_bytes
    seen = []
    for number, empty in enumerate([0, 10**9, 10**9, 70_000, 70_000, 10**9, 0, 0]):
        meter.empty = empty
        assert run.steps(1, first=number) == plain.steps(1, first=number)
        seen.append(owner.cpu_chunks[0])
        assert meter.free() >= threshold or seen[-1] == total
    assert seen[:3] == [total, 0, 0], "all state begins in host memory, and returns when there is room"
    assert 0 < seen[3] == seen[4] < total and seen[5:] == [0, total, total]
    assert owner.host_bytes <= state + 4 * 5 * 1280, "what came near left nothing behind but staging"
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert ours.equal(theirs)


def test_chunks_that_return_leave_host_memory():
    mode = OffloadSettings(mode=UPDATE, fraction=1.0, is_auto=True, overlap=True, chunk_size=1280, threshold=1)
    run = make_run({"overlap_reduce": True}, fields=SMALL, offload=mode)
    run.optimizer._auto.meter = meter = Meter(run)
    meter.empty = 10**9
    run.steps(3)
    on_cpu = [chunk for chunks in run.optimizer.chunks for chunk in chunks if chunk.on_cpu]
    assert len(on_cpu) < run.optimizer.cpu_chunks[1]
    assert run.optimizer.host_bytes == sum(chunk.nbytes + 4 * chunk.size for chunk in on_cpu), "states and gradients"
    run.data_parallel.synchronize()


def test_peak_meter():
    """Falls when memory is touched, rises again when that is over and forgotten."""
    meter, size = PeakMeter(CPU), 200 * 2**20
    meter.reset()
    before = meter.free()
    block = torch.ones(size // 4)
    del block
    during = meter.free()
    meter.reset()
    after = meter.free()
    assert during < before - size // 2 and after > during + size // 2
