"""Learning rate and weight decay against values worked out by hand."""

import json
import math

import pytest

from megatron.base.errors import CheckpointError
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.lr_schedule import ParamSchedule

LR, MIN = 1.0, 0.1


def schedule(style, length=110, optimizer=None, unit="iterations", **fields):
    config = ScheduleConfig(lr=LR, min_lr=MIN, lr_decay_style=style, **fields)
    return ParamSchedule(config, optimizer or OptimizerConfig(), length, unit)


WARM = {"lr_warmup_iters": 10}
WSD = {"lr_warmup_iters": 10, "lr_wsd_decay_iters": 20}
# A run of 110 with a warm-up of 10: the decay covers 100 positions, so 60 is its middle and 35 its first quarter.
VALUES = [
    ("constant", WARM, {0: 0.0, 5: 0.5, 10: 1.0, 11: 1.0, 110: 1.0, 500: 1.0}),
    ("constant", {}, {0: 1.0, 1: 1.0}),
    ("linear", WARM, {0: 0.0, 1: 0.1, 10: 1.0, 35: 0.775, 60: 0.55, 110: 0.1, 111: 0.1, 500: 0.1}),
    ("linear", {"lr_decay_iters": 50}, {0: 1.0, 25: 0.55, 50: 0.1, 51: 0.1}),
    ("linear", {"lr_warmup_iters": 10, "lr_warmup_init": 0.2}, {0: 0.2, 5: 0.6, 10: 1.0}),
    ("linear", {"lr_warmup_fraction": 0.1}, {0: 0.0, 5.5: 0.5, 11: 1.0, 60.5: 0.55}),
    ("cosine", WARM, {10: 1.0, 35: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 60: 0.55, 110: 0.1, 111: 0.1}),
    ("inverse-square-root", WARM, {5: 0.5, 10: 1.0, 40: 0.5, 90: 1 / 3, 110: math.sqrt(1 / 11), 111: 0.1}),
    ("inverse-square-root", {}, {0: 1.0, 1: 1.0, 4: 0.5, 100: 0.1, 110: 0.1}),
    ("WSD", WSD, {5: 0.5, 10: 1.0, 89: 1.0, 90: 1.0, 100: 0.1 + 0.9 * (math.sqrt(2) - 1), 110: 0.1, 111: 0.1}),
    ("WSD", {**WSD, "lr_wsd_decay_style": "linear"}, {90: 1.0, 95: 0.775, 100: 0.55, 110: 0.1}),
    ("WSD", {**WSD, "lr_wsd_decay_style": "cosine"}, {90: 1.0, 95: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 100: 0.55}),
    ("WSD", {**WSD, "lr_wsd_decay_style": "minus_sqrt"}, {90: 1.0, 95: 0.55, 110: 0.1, 111: 0.1}),
    # No decay phase: stable to the end of the decay length, and the minimum only beyond it.
    ("WSD", {**WSD, "lr_wsd_decay_iters": 0}, {5: 0.5, 10: 1.0, 90: 1.0, 109: 1.0, 110: 1.0, 111: 0.1}),
    ("WSD", {"lr_wsd_decay_iters": 0, "lr_decay_iters": 50}, {0: 1.0, 50: 1.0, 51: 0.1}),
]


@pytest.mark.parametrize(("style", "fields", "expected"), VALUES)
def test_learning_rate_by_hand(style, fields, expected):
    made = schedule(style, **fields)
    assert {p: made.learning_rate(p) for p in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("style", "fields", "expected"), VALUES)
def test_the_decoupled_rate_has_the_same_shape_between_other_ends(style, fields, expected):
    both = schedule(style, decoupled_lr=2.5, decoupled_min_lr=0.5, **fields)
    alone = ParamSchedule(ScheduleConfig(lr=2.5, min_lr=0.5, lr_decay_style=style, **fields), OptimizerConfig(), 110)
    assert {p: both.decoupled_learning_rate(p) for p in expected} == {p: alone.learning_rate(p) for p in expected}
    assert {p: both.learning_rate(p) for p in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "fields", "expected"),
    [
        (
            "linear",
            {**WARM, "decoupled_lr": 2.0, "decoupled_min_lr": 0.2},
            {5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2, 111: 0.2},
        ),
        ("linear", {**WARM, "decoupled_lr": 2.0}, {5: 1.0, 10: 2.0, 60: 1.05, 110: MIN, 111: MIN}),
        ("linear", {**WARM, "decoupled_lr": 0.5, "lr_warmup_init": 0.2}, {0: 0.2, 5: 0.35, 10: 0.5, 110: MIN}),
        ("inverse-square-root", {**WARM, "decoupled_lr": 2.0, "decoupled_min_lr": 0.8}, {10: 2.0, 40: 1.0, 90: 0.8}),
        ("constant", {"decoupled_lr": 0.0}, {0: 0.0, 50: 0.0, 500: 0.0}),
        ("cosine", {}, {0: LR, 55: 0.55, 110: MIN}),
    ],
    ids=["own minimum", "the others' minimum", "one first rate", "inverse square root", "zero", "not given"],
)
def test_decoupled_rate_by_hand(style, fields, expected):
    made = schedule(style, **fields)
    assert {p: made.decoupled_learning_rate(p) for p in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "phase", "steepest"),
    [
        ("linear", "", 0.002),
        ("cosine", "", 0.002),
        ("WSD", "exponential", 0.002),
        ("WSD", "linear", 0.002),
        ("WSD", "cosine", 0.002),
        ("WSD", "minus_sqrt", 0.0202),  # its slope is infinite where it starts: 0.9 sqrt(1 / 2000) in the first step
    ],
)
def test_no_jump_at_a_border_and_never_rises_after_the_warm_up(style, phase, steepest):
    wsd = {"lr_wsd_decay_iters": 2_000, "lr_wsd_decay_style": phase} if phase else {}
    made = schedule(style, 11_000, lr_warmup_iters=1_000, **wsd)
    borders = (1_000, 9_000, 11_000)
    rates = [made.learning_rate(border + step) for border in borders for step in (-1, 0, 1)]
    for border in (1, 4, 7):
        before, at, after = rates[border - 1 : border + 2]
        assert abs(at - before) <= steepest and abs(after - at) <= steepest
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_samples_give_the_same_rates_as_iterations():
    in_iterations = schedule("cosine", 110, lr_warmup_iters=10)
    in_samples = schedule("cosine", 110 * 8, unit="samples", lr_warmup_samples=80)
    assert [in_samples.learning_rate(8 * p) for p in range(120)] == [in_iterations.learning_rate(p) for p in range(120)]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("linear", {0: 0.1, 25: 0.15, 50: 0.2, 100: 0.3, 101: 0.3}),
        ("cosine", {0: 0.1, 25: 0.1 + 0.2 * (2 - math.sqrt(2)) / 4, 50: 0.2, 100: 0.3, 101: 0.3}),
    ],
)
def test_weight_decay_ramps(style, expected):
    ramp = OptimizerConfig(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.3)
    made = schedule("linear", 100, optimizer=ramp)
    assert {p: made.weight_decay(p) for p in expected} == pytest.approx(expected, abs=1e-12)


def test_constant_weight_decay():
    made = schedule("linear", 100, optimizer=OptimizerConfig(weight_decay=0.07))
    assert [made.weight_decay(p) for p in (0, 50, 1000)] == [0.07] * 3


def test_the_state_survives_json_and_the_same_schedule_resumes():
    made = schedule("cosine", lr_warmup_fraction=0.013)
    made.resolve(json.loads(json.dumps(made.state())))
    made.resolve(None)


def test_another_schedule_is_refused_unless_a_flag_says_who_wins():
    saved = schedule("cosine", 110)
    with pytest.raises(CheckpointError, match=r"decay_length: 110 saved, 220 asked.*--override-opt_param-scheduler"):
        schedule("cosine", 220).resolve(saved.state())

    flags_win = schedule("cosine", 220, override_opt_param_scheduler=True)
    flags_win.resolve(saved.state())
    assert flags_win.learning_rate(110) == pytest.approx(0.55)

    checkpoint_wins = schedule("cosine", 220, use_checkpoint_opt_param_scheduler=True)
    checkpoint_wins.resolve(json.loads(json.dumps(saved.state())))
    assert checkpoint_wins.state() == saved.state()
    assert checkpoint_wins.learning_rate(55) == pytest.approx(0.55)
    assert checkpoint_wins.learning_rate(110) == pytest.approx(0.1)


def test_the_decoupled_rate_is_part_of_the_schedule():
    saved = json.loads(json.dumps(schedule("cosine", decoupled_lr=2.0).state()))
    schedule("cosine", decoupled_lr=2.0, decoupled_min_lr=MIN).resolve(saved)
    for fields, words in (
        ({}, "decoupled_max_lr: 2.0 saved, None asked"),
        ({"decoupled_lr": 3.0}, "decoupled_max_lr: 2.0 saved, 3.0 asked"),
        ({"decoupled_lr": 2.0, "decoupled_min_lr": 0.4}, "decoupled_min_lr: 0.1 saved, 0.4 asked"),
    ):
        with pytest.raises(CheckpointError, match=words):
            schedule("cosine", **fields).resolve(saved)
        flags_win = schedule("cosine", **fields, override_opt_param_scheduler=True)
        flags_win.resolve(saved)
        assert flags_win.decoupled_learning_rate(0) == fields.get("decoupled_lr", LR)
        checkpoint_wins = schedule("cosine", **fields, use_checkpoint_opt_param_scheduler=True)
        checkpoint_wins.resolve(saved)
        assert (checkpoint_wins.decoupled_learning_rate(0), checkpoint_wins.decoupled_learning_rate(111)) == (2.0, MIN)


def test_a_schedule_that_was_saved_before_there_was_a_decoupled_rate_has_none():
    saved = {name: value for name, value in schedule("cosine").state().items() if not name.startswith("decoupled")}
    schedule("cosine").resolve(saved)
    with pytest.raises(CheckpointError, match=r"decoupled_max_lr: None saved, 2\.0 asked"):
        schedule("cosine", decoupled_lr=2.0).resolve(saved)


def test_a_change_without_effect_is_no_change():
    short = schedule("constant", 100, lr_warmup_iters=10)
    schedule("constant", 200, lr_warmup_iters=10).resolve(short.state())
    low = schedule("constant", decoupled_lr=2.0, decoupled_min_lr=0.2)
    schedule("constant", decoupled_lr=2.0).resolve(low.state())
    fixed = schedule("linear", 100, lr_decay_iters=100)
    schedule("linear", 200, lr_decay_iters=100, lr_warmup_init=0.5).resolve(fixed.state())


def test_a_schedule_of_another_version_is_refused():
    saved = schedule("linear").state()
    del saved["unit"]
    with pytest.raises(CheckpointError, match="--finetune"):
        schedule("linear", use_checkpoint_opt_param_scheduler=True).resolve(saved)
