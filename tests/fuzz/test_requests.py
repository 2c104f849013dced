from tests.fuzz.campaign import expect_none_fails
from tests.fuzz.requests import campaign


def test_a_sample_of_requests():
    with campaign() as made:
        counts = expect_none_fails(made, 1, 60)
    assert counts["answered"] > 5 and counts["refused 400"] > 5, counts
