"""The grid of the emulated cluster, and what is read from the logs of its runs."""

import pytest

from benchmarks.planner.emulated.grid import MODELS, RANKS, STEPS, cases
from benchmarks.planner.emulated.measure import steps_of
from megatron.tooling.plan.run import settings_of

LINE = " [2026-01-02 03:04:05.000678] iteration {0:8d}/      10 | elapsed time per iteration (ms): {1} | lm loss: 2.0E+00 |"
SUMMARY = "where iteration 2 went: 900.1 ms | compute 60.0% | dp 30.5% | bubble 9.0% | other 0.5%"


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_a_run(case):
    run, settings = settings_of(case.flags, RANKS, description="A case.")
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
    assert second.milliseconds == 900.5
    assert second.shares == {"compute": 0.6, "dp": 0.305, "bubble": 0.09, "other": 0.005}
