from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.kills import CAMPAIGN


def test_a_sample():
    """By hand: `python -m tests.fuzz.kills --seed 1 --cases 100`."""
    expect_none_fails(CAMPAIGN, 10, 2)
