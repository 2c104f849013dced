"""A bounded sample of the campaign of orders of asynchronous work."""

from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.orders import CAMPAIGN


def test_sample():
    assert expect_none_fails(CAMPAIGN, seed=7, cases=1)["same bits"]
