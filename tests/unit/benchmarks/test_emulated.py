"""The grid of the emulated cluster, what is read from the logs of its runs, and what is compared."""

import csv
import dataclasses

import pytest

from benchmarks.planner.emulated.grid import MODELS, RANKS, STEPS, cases
from benchmarks.planner.emulated.measure import KINDS, steps_of
from benchmarks.planner.emulated.predict import at_speed, references_in, shares_of
from benchmarks.planner.emulated.profiles import medians
from benchmarks.planner.emulated.reference import references_of
from benchmarks.planner.emulated.report import compare, report
from benchmarks.planner.emulated.wire import sent_by_hosts
from megatron.planner.time.profile_file import HEAD, EndRow
from megatron.planner.time.stage_time import BUBBLE, DP, GEMM, OPTIMIZER, TP, Parts
from megatron.planner.time.step_time import StepTime
from megatron.tooling.plan.run import settings_of
from tests.unit.planner.profiles import profile_of

LINE = " [2026-01-02 03:04:05.000678] iteration {0:8d}/      10 | elapsed time per iteration (ms): {1} | lm loss: 2.0E+00 |"
SUMMARY = "where iteration 2 went: 900.1 ms | compute 60.0% | dp 30.5% | bubble 9.0% | other 0.5%"


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_a_run(case):
    run, settings = settings_of(case.flags(), RANKS, description="A case.")
    assert run.train.train_iters == STEPS
    assert 1 <= settings.batches.final_num_microbatches <= 8


def test_the_grid_has_what_the_planner_is_asked_about():
    names = {case.layout for case in cases()}
    for word in ("zero-3", "tp overlap", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "p2p", "all_gather", "a2a"):
        assert any(word in name for name in names)
    assert len(cases()) >= 36
    assert {model.hosts for model in MODELS} == {2, 4}


def test_steps_and_their_parts_are_read_from_the_log():
    first, second = steps_of("\n".join(["a word", LINE.format(1, 950.0), LINE.format(2, 900.5), SUMMARY]))
    assert (first.milliseconds, first.shares) == (950.0, {})
    assert second.milliseconds == 900.1  # without what comes between two steps
    assert second.shares == {"compute": 0.6, "dp": 0.305, "bubble": 0.09, "other": 0.005}


def case_of(name):
    (case,) = [case for case in cases() if case.name == name]
    return case


def test_times_of_several_profiles_are_their_medians():
    row = EndRow(
        end=HEAD,
        tp=1,
        sequence_parallel=False,
        cp=1,
        micro_batch=2,
        seq_length=8,
        forward_seconds=1.0,
        input_grad_seconds=2.0,
        weight_grad_seconds=3.0,
        spread=0.0,
    )
    wider = dataclasses.replace(row, tp=2, forward_seconds=9.0)
    slower, faster = (dataclasses.replace(row, forward_seconds=seconds) for seconds in (5.0, 0.5))
    assert medians([[slower, wider], [row], [faster]]) == (row, wider)


class TestBytesOnTheWire:
    def sent(self, name):
        case = case_of(name)
        run, settings = settings_of(case.flags(), RANKS, description="A case.")
        return sent_by_hosts(run, settings, RANKS // case.model.hosts)

    def test_stages_send_hidden_states_of_all_samples(self):
        hidden = 16 * 192 * 192 * 4  # samples, tokens, channels, bytes
        assert self.sent("narrow: gpipe") == pytest.approx([hidden, hidden], rel=2e-3)
        assert self.sent("narrow: zb-v") == pytest.approx([2 * hidden, 2 * hidden], rel=2e-3)

    def test_replicas_send_each_other_gradients_and_parameters(self):
        layer = 4 * 192 * 192 + 3 * 192 * 512 + 2 * 192
        numel = 4 * layer + 2 * 1024 * 192 + 192
        to_other_host = 2 * 2 / 4 * 4 * numel  # 2 ranks of a host, 2 quarters each, 4 bytes
        assert self.sent("narrow: dp") == pytest.approx([2 * to_other_host] * 2, rel=2e-3)
        # sums of two microbatches, and parameters
        assert self.sent("narrow: zero-2") == pytest.approx([3 * to_other_host] * 2, rel=2e-3)

    def test_ranks_of_one_host_send_nothing_over_its_link(self):
        assert self.sent("narrow: tp") == pytest.approx([number / 2 for number in self.sent("narrow: dp")], rel=2e-3)


def test_shares_are_the_mean_over_pipeline_ranks():
    slow, fast = Parts({GEMM: 6.0, TP: 1.0}), Parts({GEMM: 4.0, TP: 1.0})
    time = StepTime(
        seconds=10.0,
        parts={GEMM: 6.0, TP: 1.0, BUBBLE: 1.0, DP: 1.5, OPTIMIZER: 0.5},
        model_flops=1.0,
        tokens=1,
        ranks=2,
    )
    shares = shares_of(time, [slow, fast])
    assert shares["compute"] == pytest.approx(0.55)
    assert shares["tp"] == pytest.approx(0.1)
    assert shares["dp"] == pytest.approx(0.15)
    assert shares["bubble"] == pytest.approx(0.2)  # the faster rank waits for the other one
    assert sum(shares.values()) == pytest.approx(1.0)


class TestReport:
    def rows(self, layout, steps_ms, **others):
        kinds = dict.fromkeys(KINDS, 0.0) | {"compute": 0.9, "dp": 0.1}
        return {
            "model": "narrow",
            "layout": layout,
            "hosts": 2,
            "rate": 100,
            "status": "ok",
            "step_ms": steps_ms,
            "profile_speed_ms": steps_ms,
            "reference_ms": "20.0",
            "flags": "",
            **kinds,
            **others,
        }

    def write(self, path, rows):
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            table.writeheader()
            table.writerows(rows)
        return path

    def test_errors_order_and_bytes(self, tmp_path):
        runs = [
            self.rows("a", "100.0 110.0", steps=10, sent="1000 1000"),
            self.rows("a", "90.0 100.0", steps=14, sent="1404 1400"),
            self.rows("b", "200.0 200.0", steps=10, sent="1000 1000"),
            self.rows("c", "", status="failed: no memory"),
        ]
        guesses = [
            self.rows("a", "105.0", sent="100 100"),
            self.rows("b", "180.0", sent="100 100", compute=0.8, dp=0.2),
            self.rows("c", "1.0", sent="1 1"),
        ]
        found, failed = compare(self.write(tmp_path / "m.csv", runs), self.write(tmp_path / "p.csv", guesses))
        assert failed == ["narrow: c: failed: no memory"]
        assert [each.error for each in found] == pytest.approx([0.05, -0.1])
        assert found[0].wire_error == pytest.approx(0.005)
        assert found[1].wire_error is None
        assert found[1].farthest in (("compute", pytest.approx(-10.0)), ("dp", pytest.approx(10.0)))
        text = report(found, failed)
        assert "| narrow | 100 | 2 | 7.5 % | 9.5 % |" in text
        assert "among the first 5 predicted in 1 and the first in 1 of 1 cells" in text


def test_a_slower_processor_stretches_computation_alone():
    profile = dataclasses.replace(profile_of(), update_parameters_per_second=100.0, step_seconds=1.0)
    slow = at_speed(profile, 1.25)
    assert slow.layers[0].forward_seconds == 1.25 * profile.layers[0].forward_seconds
    assert slow.layers[0].again_seconds["mlp"] == 1.25 * profile.layers[0].again_seconds["mlp"]
    assert slow.ends[0].weight_grad_seconds == 1.25 * profile.ends[0].weight_grad_seconds
    assert (slow.update_parameters_per_second, slow.step_seconds) == (80.0, 1.25)
    assert slow.messages == profile.messages


def test_references_are_read_from_the_log():
    text = "a word\nreference: 50.25 ms\niteration\nreference: 61 ms\n"
    assert references_of(text) == [50.25, 61.0]


def test_the_reference_of_a_run_is_the_mean_over_its_repeats(tmp_path):
    rows = [("ok", "50.0"), ("ok", "60.0"), ("failed: no memory", "")]
    lines = ["model,layout,rate,status,reference_ms", *(f"narrow,dp,100,{status},{time}" for status, time in rows)]
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(lines))
    assert references_in(path) == {("narrow", "dp", "100"): 55.0}
