"""What --try makes of measured steps."""

import pytest

from megatron.base.errors import ConfigError
from megatron.tooling.plan.try_runs import corrected, step_seconds_of, try_layout
from tests.e2e.helpers.runs import MOCK, flags

LINE = " [2026-01-01 00:00:00] iteration {}/ 8 | consumed samples: 4 | elapsed time per iteration (ms): {} | lm loss: 1.0\n"


def test_the_first_steps_of_a_log_do_not_count():
    log = "".join(LINE.format(number, time) for number, time in enumerate((900.0, 700.0, 500.0, 10.0, 30.0, 20.0), 1))
    assert step_seconds_of(log) == pytest.approx(0.02)


def test_a_log_without_steps_is_refused():
    with pytest.raises(ConfigError, match="more than 3 steps"):
        step_seconds_of(LINE.format(1, 9.0))


def test_measured_layouts_keep_their_time_and_the_others_get_the_factor():
    found = corrected([1.0, 1.1, 1.2, 1.3], {0: 2.0, 1: 1.1})
    assert found.factor == pytest.approx(2**0.5)
    assert found.seconds == pytest.approx((2.0, 1.1, 1.2 * 2**0.5, 1.3 * 2**0.5))
    assert found.order == (1, 2, 3, 0)


@pytest.mark.slow
def test_a_layout_is_run_through_the_normal_entry_without_checkpoints(tmp_path):
    words = flags(MOCK, {"--save": tmp_path / "saved", "--save-interval": 1, "--log-interval": 100})
    assert 0 < try_layout([str(word) for word in words], 1, steps=5) < 60
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_layout_that_cannot_run_says_why():
    words = [str(word) for word in flags(MOCK, {"--tensor-model-parallel-size": 3})]
    with pytest.raises(ConfigError, match=r"ended with code 2.*3"):
        try_layout(words, 1)
