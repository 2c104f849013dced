"""Steps that are not applied: the weights stay as they are, the log says so, and the run goes on."""

import itertools
import math

import pytest

from tests.e2e.helpers.drivers import NAN_WEIGHT
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, TRAINING, checkpoint, flags, lines

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
    assert result.codes == [0], result.text  # five in a row are below the limit
    assert column(result, "loss scale") == [2**25] * 6
    assert column(result, "number of skipped iterations") == [1, 0, 0, 0, 0, 0]
    assert column(result, "number of nan iterations") == [0, 1, 1, 1, 1, 1]
    assert result.stdout[0].count("gradients are not finite") == 5


def saving(tmp_path, **changes):
    return {"--save": tmp_path / "save", "--save-interval": 2, "--save-retain": 1, **changes}


def held(tmp_path):
    return sorted(path.name for path in (tmp_path / "save").glob("iter_*"))


@pytest.mark.parametrize(
    ("options", "last", "named"),
    [
        ({}, 9, NAN_WEIGHT),
        ({"--pipeline-model-parallel-size": 2}, 9, NAN_WEIGHT),
        # Scales 8 (twice), 4 and 2 are given up first.
        ({"--fp16": None, "--initial-loss-scale": 8}, 13, NAN_WEIGHT),
        # The first update spoils all weights.
        ({"--no-check-for-nan-in-loss-and-grad": None}, 9, "embedding.word_embeddings.weight"),
    ],
)
def test_nan_weights_end_the_run_and_leave_its_checkpoints(tmp_path, options, last, named):
    long = saving(
        tmp_path, **{"--train-iters": 40, "--exit-interval": 20, "--max-consecutive-nan-iterations": 4, **options}
    )
    result = run(flags(MOCK, long), tmp_path / "log", 2, driver=DRIVERS + "nan_weight", env={"FAULTY_STEP": 6})
    assert result.codes[0] == 1 and held(tmp_path) == ["iter_0000004"], result.text
    said = (
        f"error: gradients were not finite in 4 iterations in a row, the last one {last}: weight {named} is not finite"
    )
    assert result.stderr[0].startswith(said) and result.stderr[0].count("\n") == 1, result.text
    assert result.stderr[1] == "" and "Traceback" not in result.text
    assert "iteration 6: not saved" in result.stdout[0]
    # The same command goes on from there.
    again = run(flags(MOCK, long, {"--load": tmp_path / "save", "--exit-interval": 6}), tmp_path / "log2", 2)
    assert again.codes == [0, 0] and held(tmp_path) == ["iter_0000006"], again.text


def test_the_end_of_a_run_with_nan_weights_is_an_error_too(tmp_path):
    few = saving(tmp_path, **{"--train-iters": 8, "--max-consecutive-nan-iterations": 0})
    result = run(flags(MOCK, few), tmp_path / "log", driver=DRIVERS + "nan_weight", env={"FAULTY_STEP": 6})
    assert result.codes == [1] and held(tmp_path) == ["iter_0000004"], result.text
    assert f"ends at iteration 8 and weight {NAN_WEIGHT} is not finite" in result.stderr[0]


def test_the_last_step_is_not_finite_and_the_weights_are(tmp_path):
    """The run is complete: it is saved, and what was saved before stays, in case this is worth nothing."""
    env = {"FAULTY_RANK": 1}
    short = saving(tmp_path, **{"--train-iters": 3})
    result = run(flags(MOCK, short), tmp_path / "log", 2, driver=DRIVERS + "nan_gradient", env=env)
    assert result.codes == [0, 0] and held(tmp_path) == ["iter_0000002", "iter_0000003"], result.text


def test_a_gradient_is_named_where_the_weights_are_finite(tmp_path):
    """That of the last parameter of the model, on one rank: the first that backward comes to."""
    options = {"--max-consecutive-nan-iterations": 1}
    result = run(flags(MOCK, options), tmp_path / "log", 2, driver=DRIVERS + "nan_gradient", env={"FAULTY_RANK": 1})
    said = "the last one 3: gradient of decoder.final_layernorm.weight is not finite"
    assert result.codes[0] == 1 and said in result.stderr[0], result.text


def test_search_for_the_loss_scale_puts_saves_off_and_ends_no_run(tmp_path):
    fp16 = {"--fp16": None, "--initial-loss-scale": 2**26, "--loss-scale-window": 100}
    options = saving(tmp_path, **fp16, **{"--save-interval": 3, "--max-consecutive-nan-iterations": 1})
    result = run(flags(MOCK, options), tmp_path / "log")
    assert result.codes == [0], result.text
    skipped = column(result, "number of skipped iterations")
    first = skipped.index(0) + 1  # the first step that was applied
    assert first > 3 and f"saved checkpoint from iteration {first:7d}" in result.stdout[0], result.text
    assert checkpoint(tmp_path / "save" / "iter_0000010")[1]["train"]["skipped_iterations"] == sum(skipped)


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
