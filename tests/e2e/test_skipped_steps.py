"""Steps that are not applied: the weights stay as they are, the log says so, and the run goes on."""

import itertools
import math

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, TRAINING, flags, lines

DRIVERS = "tests.e2e.helpers.drivers:"
SIX = {"--train-iters": 6}


def column(result, name):
    return [line.get(name) for line in lines(result.stdout[0])]


def digests(text):
    return [line.split()[1] for line in text.splitlines() if line.startswith("digest ")]


def test_nan_in_one_ranks_gradient(tmp_path):
    env = {"FAULTY_RANK": 1}
    result = run(flags(MOCK, SIX), tmp_path / "log", 2, driver=DRIVERS + "nan_gradient", env=env)
    assert result.codes == [0, 0] and result.stderr == ["", ""], result.text
    assert column(result, "number of nan iterations") == [0, 0, 1, 0, 0, 0]
    assert column(result, "number of skipped iterations") == [0] * 6
    assert [loss is None for loss in column(result, "lm loss")] == [False, False, True, False, False, False]
    assert column(result, "consumed samples") == [8, 16, 24, 32, 40, 48]
    # Printed is the rate of the next step, and a step that is not applied does not move the schedule.
    linear = [TRAINING["--lr"] * (1 - applied / 6) for applied in (1, 2, 2, 3, 4, 5)]
    assert column(result, "learning rate") == pytest.approx(linear, rel=1e-6)
    for text in result.stdout:
        one, two, three, *rest = digests(text)
        assert two == three and len({one, two, *rest}) == 5
    assert digests(result.stdout[0]) == digests(result.stdout[1])
    said = "iteration 3: gradients are not finite (norm nan); the step was skipped"
    assert [text.count(said) for text in result.stdout] == [1, 0]


def test_fp16_overflow_lowers_the_scale(tmp_path):
    fp16 = {"--fp16": None, "--initial-loss-scale": 2**26, "--loss-scale-window": 100}
    result = run(flags(MOCK, fp16), tmp_path / "log", driver=DRIVERS + "digests")
    assert result.codes == [0] and result.stderr == [""], result.text
    skipped, scales = column(result, "number of skipped iterations"), column(result, "loss scale")
    # The default hysteresis forgives the first overflow; it is a skipped step all the same.
    assert scales[:4] == [2**26, 2**25, 2**24, 2**23] and skipped[:4] == [1, 1, 1, 1] and 0 in skipped
    for before, after, skip in zip(scales, scales[1:], skipped[1:]):
        assert after == (before / 2 if skip else before)
    assert [loss is None for loss in column(result, "lm loss")] == [skip == 1 for skip in skipped]
    assert [math.isfinite(norm) for norm in column(result, "grad norm")] == [skip == 0 for skip in skipped]
    assert column(result, "number of nan iterations") == [0] * 10
    weights = digests(result.stdout[0])
    assert [a == b for a, b in itertools.pairwise(weights)] == [skip == 1 for skip in skipped[1:]]


def test_fp16_overflow_at_the_lowest_scale_is_a_nan(tmp_path):
    fp16 = {"--fp16": None, "--initial-loss-scale": 2**26, "--min-loss-scale": 2**25, "--hysteresis": 1}
    result = run(flags(MOCK, SIX, fp16), tmp_path / "log")
    assert result.codes == [0], result.text
    assert column(result, "loss scale") == [2**25] * 6
    assert column(result, "number of skipped iterations") == [1, 0, 0, 0, 0, 0]
    assert column(result, "number of nan iterations") == [0, 1, 1, 1, 1, 1]
    assert result.stdout[0].count("gradients are not finite") == 5


def test_iterations_to_skip(tmp_path):
    plain = run(flags(MOCK, SIX), tmp_path / "log")
    result = run(flags(MOCK, SIX, {"--iterations-to-skip": (3, 5)}), tmp_path / "log2")
    assert result.codes == [0], result.text
    assert column(result, "number of skipped iterations") == [0, 0, 1, 0, 1, 0]
    assert [loss is None for loss in column(result, "lm loss")] == [False, False, True, False, True, False]
    assert column(result, "consumed samples") == column(plain, "consumed samples")
    # Iteration 4 reads its own data with the weights of iteration 2.
    assert column(result, "lm loss")[:2] == column(plain, "lm loss")[:2]
    assert column(result, "lm loss")[3] not in column(plain, "lm loss")
