"""Numbers outside their intervals are named."""

import pytest

from megatron.config.flag import flag_of
from megatron.config.rules.ranges import numbers_are_in_range
from megatron.config.run import flag_fields
from tests.unit.config.runs import make_run

RANGES = {name: flag_of(spec).within for name, (_, spec) in flag_fields().items() if flag_of(spec).within is not None}
FLOATS = ("nan", "inf", "-inf")
OUTSIDE = {
    "from 0 to 1": -0.5,
    "at least 0 and below 0.5": 0.5,
    "above 0": 0,
    "0 or more": -1,
    "at least 0 and below 1": 1,
    "above 0 and at most 1": 1.5,
    "1 or more": 0,
    "above 1": 1,
    "above 0 and at most 1000000": 1e300,
}


def outside(name):
    """A number that the field must not hold; of a bounded whole number one that is too large."""
    words = RANGES[name].words
    return OUTSIDE[words] if words in OUTSIDE else int(words.rpartition(" ")[2]) + 1


@pytest.mark.parametrize("name", RANGES)
def test_a_number_outside_its_interval_is_named(name):
    value = outside(name)
    held = (value, value, value) if name in ("rampup_batch_size", "iterations_to_skip") else value
    message = numbers_are_in_range(make_run(**{name: held}))
    assert message is not None and message.endswith(f"got {value}") and RANGES[name].words in message


def test_every_number_has_an_interval():
    numbers = {
        name
        for name, (_, spec) in flag_fields().items()
        if ("int" in str(spec.type) or "float" in str(spec.type)) and spec.metadata["flag"].choices is None
    }
    assert set(RANGES) == numbers


@pytest.mark.parametrize("value", [10**400, -(10**400), *map(float, FLOATS)])
def test_no_interval_holds_what_is_not_finite_or_beyond_any_size(value):
    bounded = {interval for interval in RANGES.values() if isinstance(value, float) or " to " in interval.words}
    assert len(bounded) > 5 and not any(interval.holds(value) for interval in bounded)


def test_every_whole_number_has_an_upper_bound():
    """A slip of the finger must not fork or allocate until the machine stops."""
    whole = {name for name, (_, spec) in flag_fields().items() if "int" in str(spec.type) and name in RANGES}
    assert whole and {name for name in whole if RANGES[name].holds(10**13)} == set()
