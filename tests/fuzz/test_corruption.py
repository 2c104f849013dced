"""A bounded sample of damaged files; `python -m tests.fuzz.corruption --seed 1 --cases 150` runs more."""

from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.corruption import CAMPAIGN


def test_damaged_files_are_refused_or_read_as_if_whole():
    counts = expect_none_fails(CAMPAIGN, seed=3, cases=25)
    assert counts["refused"] > 15
