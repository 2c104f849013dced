"""Progress and reports are plain data."""

import dataclasses
import json

import pytest

from megatron.training.state import StepReport, TrainState


def test_a_new_run_has_done_nothing():
    assert all(value == 0 for value in dataclasses.asdict(TrainState()).values())


def test_goes_through_json():
    """As checkpoints keep it: numbers come back with their values and types."""
    numbers = range(3, 3 + len(dataclasses.fields(TrainState)))
    state = TrainState(*(float(n) if f.type == "float" else n for n, f in zip(numbers, dataclasses.fields(TrainState))))
    back = TrainState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert back == state
    assert [type(v) for v in dataclasses.astuple(back)] == [type(v) for v in dataclasses.astuple(state)]


def test_a_report_is_final_and_owns_its_timers():
    numbers = {"grad_norm": 1.0, "loss_scale": 1.0, "learning_rate": 0.1, "global_batch_size": 8, "tokens": 64}
    first, second = (StepReport(iteration=1, loss=2.0, seconds=0.5, **numbers) for _ in range(2))
    assert first == second and first.timers is not second.timers
    assert not (first.skipped or first.nan) and first.num_zeros is None and first.params_norm is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.loss = 0.0
