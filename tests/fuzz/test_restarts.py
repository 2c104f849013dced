"""One job of the campaign of restarts: a rank is killed while it trains, torchrun starts all again, and the losses
agree."""

from tests.fuzz.restarts import Case, check


def test_a_job_heals_under_max_restarts(tmp_path):
    assert check(Case(hosts=1, ranks=2, kills=((9.0, 1),)), tmp_path).startswith("healed")
