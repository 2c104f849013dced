from itertools import chain

import pytest

from megatron.core.comm.link_times import ROUNDS, pairings, shared_rank, slow_links

EQUAL = {(0, 1): 0.01, (0, 2): 0.011, (1, 2): 0.012}


class TestPairings:
    @pytest.mark.parametrize("ranks", [(0, 8), (0, 4, 8), (0, 1, 2, 3), tuple(range(9))])
    def test_every_pair_meets_once(self, ranks):
        rounds = pairings(ranks)
        pairs = list(chain.from_iterable(rounds))
        assert sorted(pairs) == sorted((a, b) for a in ranks for b in ranks if a < b)
        assert all(len(set(chain.from_iterable(pairs))) == 2 * len(pairs) for pairs in rounds)

    def test_many_hosts_meet_some_others(self):
        rounds = pairings(range(0, 8000, 8))
        assert len(rounds) == ROUNDS and all(len(pairs) == 500 for pairs in rounds)
        assert len(set(chain.from_iterable(rounds))) == ROUNDS * 500

    def test_one_host_has_no_link(self):
        assert pairings([0]) == []


class TestSlowLinks:
    def test_equal_links(self):
        assert slow_links(EQUAL, {}) == {} and slow_links(EQUAL, EQUAL) == {}

    def test_one_among_others(self):
        assert slow_links({**EQUAL, (0, 2): 0.05}, {}) == {(0, 2): 0.01}

    def test_all_links_of_a_host(self):
        slow = slow_links({(0, 1): 0.01, (0, 2): 0.05, (1, 2): 0.06}, {})
        assert set(slow) == {(0, 2), (1, 2)} and shared_rank(list(slow)) == 2

    def test_the_only_one_by_its_past(self):
        assert slow_links({(0, 8): 0.05}, {}) == {}
        assert slow_links({(0, 8): 0.05}, {(0, 8): 0.01}) == {(0, 8): 0.01}

    def test_less_than_a_millisecond_is_noise(self):
        assert slow_links({(0, 1): 1e-4, (0, 2): 1e-3, (1, 2): 1e-4}, {}) == {}

    def test_what_slow_links_share(self):
        assert (
            shared_rank([(0, 2)]) is None
            and shared_rank([(0, 1), (2, 3)]) is None
            and shared_rank([(0, 2), (2, 3)]) == 2
        )
