"""A bounded sample of the campaign of suspicious numbers, and clean steps."""

from tests import pool
from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.suspicions import CAMPAIGN, train_clean


def test_sample():
    expect_none_fails(CAMPAIGN, seed=6, cases=4)


def test_clean_steps_are_not_suspicious():
    """`python -m tests.fuzz.suspicions clean 2000` runs more of them."""
    assert pool.run(2, train_clean, 120) == [[], []]
