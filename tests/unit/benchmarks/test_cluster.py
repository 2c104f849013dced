"""The arithmetic of the emulated cluster's table, and the arguments it gives to tc."""

import dataclasses
import re

import pytest

from benchmarks.cluster.faults import NAMED, JobError, read_log
from benchmarks.cluster.figures import HEADER, Cell, line, losses_agree, make_rows, slowest_rank, step_bound
from benchmarks.cluster.hosts import bucket
from benchmarks.cluster.systems import SYSTEMS, count_parameters

NUMEL = 1_000_000


class TestBound:
    def test_the_slower_of_wire_and_compute_counts(self):
        # 4 MB, half of it sent, at 100 MB/s: 0.02 s each way.
        assert step_bound(Cell(2, 800, 1), forward=0.01, backward=0.05, numel=NUMEL) == pytest.approx(0.02 + 0.05)
        assert step_bound(Cell(2, 800, 1), forward=0.03, backward=0.01, numel=NUMEL) == pytest.approx(0.03 + 0.02)

    def test_more_hosts_send_more(self):
        assert step_bound(Cell(4, 800, 1), 0.0, 0.0, NUMEL) == pytest.approx(2 * 0.03)

    def test_only_one_microbatch_hides_communication(self):
        assert step_bound(Cell(2, 800, 8), 0.01, 0.01, NUMEL) == pytest.approx(2 * 0.02 + 7 * 0.02)


def measured(seconds, sent=(1000,), wire_bytes=800.0, memory=7, loss=2.0, forward=0.0, backward=0.0):
    return {
        "seconds": list(seconds),
        "sent": list(sent),
        "wire_bytes": wire_bytes,
        "memory": memory,
        "loss": loss,
        "forward": forward,
        "backward": backward,
    }


TITLES = {"compute": "compute only", "ddp": "torch DDP"}
RANKS = [
    {"compute": measured([0.5, 0.5, 0.5], forward=0.1, backward=0.3, wire_bytes=0.0), "ddp": measured([1, 5, 2])},
    {
        "compute": measured([0.4, 0.6, 0.4], forward=0.2, backward=0.2, wire_bytes=0.0),
        "ddp": measured([3, 1, 2], sent=[1200], memory=9),
    },
]


class TestRows:
    def test_the_slowest_rank_of_each_step_and_the_median_of_steps(self):
        assert slowest_rank([[1, 5, 2], [3, 1, 2]]) == [3, 5, 2]
        compute, ddp = make_rows(Cell(2, 800, 1), NUMEL, TITLES, RANKS)
        assert (ddp.step, ddp.fastest, ddp.slowest) == (3, 2, 5)
        assert (ddp.sent, ddp.memory) == (1200, 9)
        assert compute.step == ddp.compute == 0.5
        assert ddp.bound == pytest.approx(0.2 + 0.3)

    def test_a_line_has_the_columns_of_the_header(self):
        compute, ddp = (line(row) for row in make_rows(Cell(2, 800, 1), NUMEL, TITLES, RANKS))
        assert len(ddp) == len(compute) == len(HEADER)
        assert re.findall(r"[\d.]+", ddp.split("DDP")[1]) == [
            "3.000",
            "0.500",
            "6.000",
            "0.167",
            "0.0",
            "0.0",
            "1.500",
            "0.0",
        ]

    def test_losses_that_differ_are_seen(self):
        rows = make_rows(Cell(2, 800, 1), NUMEL, TITLES, RANKS)
        assert losses_agree(rows)
        assert not losses_agree([*rows, dataclasses.replace(rows[1], loss=2.01)])


class TestBucket:
    @pytest.mark.parametrize("rate", [10.0, 100.0, 1000.0, 10000.0])
    def test_super_packets_fit_and_the_queue_is_short(self, rate):
        kind, *pairs = bucket(rate)
        values = dict(zip(pairs[::2], pairs[1::2]))
        assert kind == "tbf"
        assert values["rate"] == f"{rate:g}mbit"
        assert int(values["burst"]) >= 2 * 64 * 1024
        assert int(values["limit"]) >= 4 * int(values["burst"])
        if rate >= 100:
            assert int(values["limit"]) * 8 / (rate * 1e6) <= 0.11  # seconds


class TestFaults:
    def test_an_error_that_names_collective_and_peer(self):
        head = "error on rank 0: all_reduce number 11 on group dp_cp (ranks 0, 1) failed after 10.0 s: "
        assert NAMED.search(head + "rank 1 is gone or frozen (no heartbeat any more)")
        assert not NAMED.search(head + "the job's store does not answer, so the missing ranks are not known")
        assert not NAMED.search("error on rank 0: connection closed")

    def test_steps_are_read_from_a_log(self):
        log = [
            "number of parameters: 5",
            "[2026-01-01 00:00:00] iteration  1/  2 | elapsed time per iteration (ms): 900.0 | lm loss: 1.5E+00 |",
            "[2026-01-01 00:00:01] iteration  2/  2 | elapsed time per iteration (ms): 250.0 | lm loss: 1.4E+00 |",
        ]
        assert read_log(log, 2) == (0.25, ["1.5E+00", "1.4E+00"])
        with pytest.raises(JobError, match="expected 3 steps"):
            read_log(log, 3)


def test_the_model_is_the_one_the_figures_are_for():
    assert 16e6 < count_parameters() < 18e6
    assert "compute" in SYSTEMS
