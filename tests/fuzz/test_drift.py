"""A bounded sample of the campaign of silent faults, and one of each kind under plain data parallelism."""

import pytest

from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.drift import CAMPAIGN, EQUAL, FAULTS, NAMED, REPAIRED, SKIPPED, Case, check_case

PLAIN = dict(zip(FAULTS, (NAMED, NAMED, SKIPPED, EQUAL, SKIPPED, NAMED, NAMED), strict=True))


def test_sample():
    expect_none_fails(CAMPAIGN, seed=7, cases=8)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_replica(fault, tmp_path):
    assert check_case(Case("plain", "fp32", fault, step=1, rank=1, seed=6), tmp_path) == PLAIN[fault]


def test_weights_are_rounded_from_their_masters_again(tmp_path):
    assert check_case(Case("plain", "bf16", "weight", step=2, rank=1, seed=5), tmp_path) == REPAIRED
