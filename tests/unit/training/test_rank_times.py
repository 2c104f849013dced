import dataclasses

import pytest

from megatron.core.timeline import FinishedSpan
from megatron.training.logging.rank_times import BASELINE, CONFIRMATIONS, RankTimes, SlowRanks, measure


def rank(compute=1.0, wait=0.2, input=0.0, **changes):
    return RankTimes(compute + wait + input, wait, input, compute, 0.0, 0.0, **changes)


def sample(*computes):
    """Times of ranks whose step ends together."""
    longest = max(computes)
    return [rank(compute, wait=longest - compute + 0.2) for compute in computes]


def named(judge, times, samples=CONFIRMATIONS):
    """(kind, rank) of all that `samples` equal samples name."""
    return [(one.kind, one.rank) for _ in range(samples) for one in judge.add(times)[0]]


@pytest.fixture
def judge():
    """Of four replicas."""
    return SlowRanks([0] * 4)


class TestCompute:
    def test_a_slow_rank_is_named_once_and_its_waiting_peers_are_not(self, judge):
        assert named(judge, sample(1, 1, 1, 2), 3 * CONFIRMATIONS) == [("compute", 3)]

    def test_with_its_time_and_that_of_its_peers(self, judge):
        named(judge, sample(1, 1.1, 1, 2), CONFIRMATIONS - 1)
        (one,) = judge.add(sample(1, 1.1, 1, 2))[0]
        assert (one.seconds, one.usual) == pytest.approx((2, 1))

    def test_two_slow_ranks(self, judge):
        assert named(judge, sample(1, 1, 3, 3)) == [("compute", 2), ("compute", 3)]

    @pytest.mark.parametrize("computes", [(1, 1, 1, 1), (1, 1.4, 1, 1.2), (9, 9, 9, 9)])
    def test_nobody_is_slow(self, computes, judge):
        assert named(judge, sample(*computes), 20) == []

    def test_a_small_part_of_the_step_does_not_count(self, judge):
        assert (
            named(judge, [dataclasses.replace(one, step=20.0, wait=19.9 - one.compute) for one in sample(1, 1, 1, 2)])
            == []
        )

    def test_a_moment_does_not_count(self, judge):
        for _ in range(5):
            assert named(judge, sample(1, 1, 1, 2), CONFIRMATIONS - 1) == []
            assert judge.needs_samples
            assert named(judge, sample(1, 1, 1, 1), 1) == []

    def test_it_recovers(self, judge):
        named(judge, sample(1, 1, 1, 2))
        ends = [judge.add(sample(1, 1, 1, 1))[1] for _ in range(CONFIRMATIONS + 2)]
        assert ends == [[]] * (CONFIRMATIONS - 1) + [[("compute", 3)]] + [[]] * 2
        assert named(judge, sample(1, 1, 1, 2)) == [("compute", 3)]

    def test_stages_differ_by_nature(self):
        judge = SlowRanks([0, 0, 1, 1])
        assert named(judge, sample(1, 1, 3, 3), 20) == []
        assert named(judge, sample(1, 1, 3, 6)) == [("compute", 3)]

    def test_a_stage_of_one_rank_is_compared_with_itself(self):
        judge = SlowRanks([0, 1, 2])
        assert named(judge, sample(1, 3, 1), BASELINE) == []
        assert named(judge, sample(2, 3, 1)) == [("compute", 0)]

    def test_stages_that_all_grow_have_a_larger_batch(self):
        judge = SlowRanks([0, 1, 2])
        named(judge, sample(1, 3, 1), BASELINE)
        assert named(judge, sample(2, 6, 2)) == []

    def test_one_rank_has_nobody_to_be_compared_with(self):
        judge = SlowRanks([0])
        assert named(judge, sample(1), BASELINE) + named(judge, sample(5)) == []


class TestInput:
    def test_the_rank_that_reads(self, judge):
        times = [rank(wait=1.2), rank(wait=1.2), rank(input=1.0), rank(wait=1.2)]
        assert named(judge, times) == [("input", 2)]

    def test_a_share_of_the_step_is_usual(self, judge):
        assert named(judge, [rank(input=0.2)] * 4) == []

    def test_a_slow_disk_of_all(self, judge):
        assert named(judge, [rank(input=2.0)] * 4) == [("input", number) for number in range(4)]

    def test_a_batch_that_is_generated(self):
        assert named(SlowRanks([0, 0], judges_input=False), [rank(input=9.0)] * 2) == []


class TestSaves:
    def writes(self, judge, *seconds, nbytes=None):
        sizes = nbytes or [100.0] * len(seconds)
        times = [rank(written_bytes=n, write_seconds=s) for n, s in zip(sizes, seconds, strict=True)]
        return named(judge, times, 1)

    def test_one_save_is_enough(self, judge):
        assert self.writes(judge, 1, 1, 5, 1) == [("save", 2)]

    def test_who_writes_little_is_not_compared(self, judge):
        assert self.writes(judge, 5, 0.01, 0.01, 0.01, nbytes=[100.0, 1.0, 0.0, 1.0]) == []

    def test_who_writes_more_takes_longer(self, judge):
        assert self.writes(judge, 6, 2, 2, 2, nbytes=[300.0, 100.0, 100.0, 100.0]) == []

    def test_a_short_write_is_left_alone(self, judge):
        assert self.writes(judge, 0.1, 0.1, 0.9, 0.1) == []

    def test_a_disk_of_all_is_compared_with_earlier_saves(self, judge):
        assert self.writes(judge, 1, 1, 1, 1) == []
        assert self.writes(judge, 4, 4, 4, 4) == [("save", number) for number in range(4)]


class TestLinks:
    def test_every_rank_waits_longer(self, judge):
        named(judge, sample(1, 1, 1, 1), BASELINE)
        slow = [rank(wait=1.0)] * 4
        assert not judge.suspects_link
        assert named(judge, slow, 1) == [] and not judge.suspects_link and judge.needs_samples
        assert named(judge, slow, 1) == [] and judge.suspects_link

    def test_a_late_arrival_is_no_slow_link(self, judge):
        named(judge, sample(1, 1, 1, 1), BASELINE)
        named(judge, sample(1, 1, 1, 3))
        assert not judge.suspects_link

    def test_the_first_samples_say_what_is_usual(self, judge):
        named(judge, [rank(wait=5.0)] * 4, BASELINE + 3)
        assert not judge.suspects_link


class TestMeasure:
    def test_waits_are_taken_from_their_phase(self):
        spans = [
            FinishedSpan("iteration", "iteration 7", 10.0, 20.0),
            FinishedSpan("phase", "batch-generator", 10.0, 12.0),
            FinishedSpan("wait tp", "broadcast", 11.5, 12.0),
            FinishedSpan("phase", "forward-backward", 12.0, 17.0),
            FinishedSpan("wait pp 0>1", "receive F0", 13.0, 15.0),
            FinishedSpan("phase", "all-grads-sync", 17.0, 18.0),
            FinishedSpan("wait dp_cp", "all_reduce", 17.0, 17.75),
            FinishedSpan("phase", "optimizer", 18.0, 19.0),
            FinishedSpan("wait world", "gather_objects", 25.0, 30.0),  # behind the step
        ]
        times = measure(spans, (8, 2.0))
        assert times == RankTimes(10.0, 3.25, 1.5, 3.0, 0.25, 1.0, 8.0, 2.0)
        assert times.compute == pytest.approx(5.25)
