"""The arithmetic of the tensor-parallel table."""

import pytest

from benchmarks.cluster import tensor_parallel, tensor_worker
from benchmarks.cluster.tensor_parallel import HEADER, WAYS, line, make_rows, rate_for, step_bytes


def test_driver_and_worker_mean_the_same_layers():
    """The driver imports no torch."""
    shapes = [(of.LAYERS, of.SEQUENCE, of.MICRO_BATCH, of.HIDDEN) for of in (tensor_parallel, tensor_worker)]
    assert shapes[0] == shapes[1]
    assert tuple(tensor_worker.WAYS) == WAYS
    assert tensor_worker.__name__ == tensor_parallel.WORKER


def test_bytes_and_rate():
    # Ten collectives a layer, in each of which a rank sends half of the hidden states.
    hidden = 512 * 2 * 1024 * 4
    assert step_bytes(2) == 2 * 10 * hidden / 2
    assert step_bytes(4) == pytest.approx(2 * 10 * hidden * 3 / 4)
    assert rate_for(0.5, compute=2.0, nbytes=1e6) == pytest.approx(8.0)  # 1 MB in 1 s


def ranks_of(**seconds):
    sent = {name: step_bytes(2) * 1.01 if name != "compute" else 0 for name in seconds}
    one = {name: {"seconds": times, "sent": [sent[name]] * len(times)} for name, times in seconds.items()}
    fast = {name: {"seconds": [t / 2 for t in times], "sent": [0] * len(times)} for name, times in seconds.items()}
    return [fast, one]


def test_rows():
    """What is exposed is compared within a round: a slow round is slow for all."""
    ranks = ranks_of(compute=[1.0, 4.0, 1.0], serial=[2.0, 5.0, 2.0], bulk=[1.5, 4.5, 1.5], pieces=[1.1, 4.2, 1.1])
    rows = make_rows(0.5, rate_for(0.5, 1.0, step_bytes(2)), 2, {name: name for name in WAYS}, ranks)
    compute, serial, bulk, pieces = rows
    assert compute.step == compute.compute == 1.0 and compute.wire == pytest.approx(0.5)
    assert (serial.exposed, serial.of_serial) == (pytest.approx(1.0), 1.0)
    assert bulk.of_serial == pytest.approx(0.5) and pieces.of_serial == pytest.approx(0.1)
    assert (pieces.fastest, pieces.slowest, pieces.sent) == (1.1, 4.2, pytest.approx(1.01 * step_bytes(2)))
    assert len(line(pieces)) == len(HEADER)
    assert line(pieces).split() == [
        "50%",
        "671",
        "pieces",
        "1.100",
        "1.100",
        "0.500",
        "0.100",
        "10%",
        "1.100",
        "42.4",
        "1.010",
    ]
    assert line(compute).split() == ["50%", "671", "compute", "1.000", "1.000", "0.500"]
