"""A bounded sample of the campaign of layouts and memory features."""

from tests.fuzz import experts
from tests.fuzz.campaign import case_of, expect_none_fails
from tests.fuzz.layouts import CAMPAIGN


def test_sample():
    # Small cases with every axis, offload of activations and of the optimizer, and checkpoints that continue elsewhere.
    counts = expect_none_fails(CAMPAIGN, seed=26, cases=5)
    assert counts["refused"] < counts.total() / 2  # else the sample tests the rules alone


def test_a_campaign_has_experts_in_every_case():
    for number in range(5):
        assert any(flag[0] == "--num-experts" for flag in case_of(experts.CAMPAIGN, 1, number).model)
