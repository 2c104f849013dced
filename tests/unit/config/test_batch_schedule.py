"""Batch sizes over a run."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.train import TrainConfig


def train(**fields):
    return TrainConfig(**{"micro_batch_size": 2, **fields})


def walk(batches, iterations):
    """Consumed samples after each step, stepping as the loop does."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + batches.global_batch_size(consumed[-1]))
    return consumed


def test_constant():
    batches = BatchSchedule(train(global_batch_size=24, train_iters=10), dp=3)
    assert [batches.global_batch_size(c) for c in (0, 1, 10**9)] == [24, 24, 24]
    assert batches.num_microbatches(0) == 4
    assert (batches.total_iterations, batches.total_samples) == (10, 240)


def test_the_default_is_one_microbatch_a_replica():
    batches = BatchSchedule(train(), dp=3)
    assert (batches.global_batch_size(0), batches.num_microbatches(0)) == (6, 1)


def test_train_samples_round_down_to_whole_steps():
    batches = BatchSchedule(train(global_batch_size=24, train_samples=100), dp=1)
    assert (batches.total_iterations, batches.total_samples) == (4, 100)
    assert batches.samples_for(batches.total_iterations) == 96


def test_ramp_by_hand():
    # Two increments over 60 samples, so one every 30: 8 until 30, 16 until 60, then 24.
    batches = BatchSchedule(train(global_batch_size=24, rampup_batch_size=(8, 8, 60)), dp=2)
    expected = {0: 8, 29: 8, 30: 16, 59: 16, 60: 24, 61: 24, 10**6: 24}
    assert {c: batches.global_batch_size(c) for c in expected} == expected
    assert [batches.num_microbatches(c) for c in (0, 30, 60)] == [2, 4, 6]
    assert walk(batches, 6) == [0, 8, 16, 24, 32, 48, 64]


def test_ramp_with_increments_that_are_not_whole():
    # Three increments over 100 samples: borders at 33.3, 66.7 and 100.
    batches = BatchSchedule(train(global_batch_size=8, micro_batch_size=1, rampup_batch_size=(2, 2, 100)), dp=2)
    expected = {33: 2, 34: 4, 66: 4, 67: 6, 99: 6, 100: 8}
    assert {c: batches.global_batch_size(c) for c in expected} == expected


def test_steps_by_hand():
    # Thresholds in tokens, of samples of 16: 8 until sample 31, 12 until 62, then 24. A step begins with the size of
    # where the one before has ended.
    text = "0:8 0.5K:12 1k:24"
    batches = BatchSchedule(train(step_batch_size_schedule=text, train_samples=150), dp=2, seq_length=16)
    expected = {0: 8, 30: 8, 31: 12, 61: 12, 62: 24, 10**9: 24}
    assert {c: batches.global_batch_size(c) for c in expected} == expected
    assert [batches.num_microbatches(c) for c in (0, 31, 62)] == [2, 3, 6]
    assert walk(batches, 9) == [0, 8, 16, 24, 32, 44, 56, 68, 92, 116]
    assert (batches.total_iterations, batches.total_samples, batches.final_global_batch_size) == (10, 150, 24)
    in_samples = BatchSchedule(train(step_batch_size_schedule="0:8 31:12 62:24", train_iters=9), dp=2)
    assert walk(in_samples, 9) == walk(batches, 9) and in_samples.total_samples == 116


def test_steps_that_are_over_need_not_fit_the_processes():
    """A run that goes on with more of them; Megatron-LM's rule."""
    batches = BatchSchedule(train(step_batch_size_schedule="0:4 100:12 200:24"), dp=3)
    batches.check_from(100)
    with pytest.raises(
        ConfigError,
        match="a step of --step-batch-size-schedule of 4 is not a multiple of --micro-batch-size 2 x data-parallel size 3",
    ):
        batches.check_from(99)


def test_what_is_left_of_a_run():
    """Counted from where it is: with --train-samples the steps before may have had another batch size."""
    iterations = BatchSchedule(train(global_batch_size=24, train_iters=10), dp=1)
    assert (iterations.last_iteration(3, 72), iterations.samples_left(3, 72)) == (10, 168)
    assert (iterations.last_iteration(12, 288), iterations.samples_left(12, 288)) == (10, 0)
    samples = BatchSchedule(train(global_batch_size=24, train_samples=100), dp=1)
    assert (samples.last_iteration(6, 50), samples.samples_left(6, 50)) == (8, 50)
    assert (samples.last_iteration(9, 120), samples.samples_left(9, 120)) == (8, 0)


STEPS = {"step_batch_size_schedule": "0:4 6:8 7:12 1000:24"}


FULL = {"global_batch_size": 24}
RAMPS = [{**FULL, "rampup_batch_size": ramp} for ramp in ((8, 8, 60), (24, 8, 60), (4, 4, 1000), (4, 20, 1))]


@pytest.mark.parametrize("fields", [FULL, STEPS, *RAMPS], ids=str)
def test_samples_and_iterations_agree_with_a_walk(fields):
    batches = BatchSchedule(train(**fields), dp=2)
    consumed = walk(batches, 150)
    assert [batches.samples_for(i) for i in range(151)] == consumed
    for iterations in range(150):
        for samples in (consumed[iterations], consumed[iterations + 1] - 1):
            assert batches.iterations_for(samples) == iterations


def test_batch_sizes_do_not_depend_on_dp():
    make = lambda dp: BatchSchedule(train(global_batch_size=24, rampup_batch_size=(8, 8, 60)), dp)  # noqa: E731
    assert walk(make(1), 30) == walk(make(4), 30)
