"""Numbers outside their intervals are named."""

import pytest

from megatron.config.rules_ranges import RANGES, numbers_are_in_range
from megatron.config.run import flag_fields
from tests.unit.config.runs import make_run

OUTSIDE = {
    "from 0 to 1": -0.5,
    "above 0": 0,
    "0 or more": -1,
    "at least 0 and below 1": 1,
    "above 0 and at most 1": 1.5,
    "1 or more": 0,
}
OUTSIDE["above 1"] = 1


@pytest.mark.parametrize("name", RANGES)
def test_a_number_outside_its_interval_is_named(name):
    value = OUTSIDE[RANGES[name].words]
    held = (value, value, value) if name in ("rampup_batch_size", "iterations_to_skip") else value
    message = numbers_are_in_range(make_run(**{name: held}), 1)
    assert message is not None and message.endswith(f"got {value}") and RANGES[name].words in message


def test_every_number_has_an_interval():
    numbers = {
        name
        for name, (_, spec) in flag_fields().items()
        if ("int" in str(spec.type) or "float" in str(spec.type)) and spec.metadata["flag"].choices is None
    }
    assert set(RANGES) == numbers
