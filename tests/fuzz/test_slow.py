import pytest

from tests.fuzz.campaign import outcome
from tests.fuzz.slow import CAMPAIGN, Case


@pytest.mark.alone
def test_a_slow_rank_and_nobody_else():
    """By hand: `python -m tests.fuzz.slow --seed 1 --cases 40`."""
    word, message = outcome(CAMPAIGN, Case("dp", "sleep", 1, 0.1))
    assert word.startswith("sleep named"), message
