"""Where a step's time went, from spans made by hand."""

import pytest

from megatron.core.timeline import FinishedSpan
from megatron.training.logging.step_summary import format_summary, summarize


def rank(*spans):
    """An iteration of 10 s with these spans."""
    return [FinishedSpan("iteration", "iteration 3", 1.0, 11.0), *(FinishedSpan(*span) for span in spans)]


def shares(*ranks):
    (summary,) = summarize(ranks)
    assert sum(summary.shares.values()) == pytest.approx(1.0)
    return summary.shares


def test_waits_are_taken_out_of_compute():
    """A wait inside a forward, one across its end, one between; a transfer that nobody waits for."""
    spans = [("compute", "forward 0", 1.0, 5.0), ("step", "bucket 0", 8.0, 10.0)]
    waits = [
        ("wait tp", "all_gather", 2.0, 2.5),
        ("wait shard", "reduce_scatter", 4.5, 6.0),
        ("wait dp_cp", "x", 7.0, 7.5),
    ]
    found = shares(rank(*spans, *waits, ("tp", "all-gather, step 1", 1.0, 4.0)))
    assert found == pytest.approx({"compute": 0.5, "tp": 0.05, "dp": 0.2, "other": 0.25})


def test_copies_to_far_memory_have_a_share_of_their_own():
    spans = [("compute", "forward 0", 1.0, 5.0), ("wait offload", "0 of stage 0", 2.0, 3.0)]
    assert shares(rank(*spans, ("reload", "0 of stage 0", 1.0, 3.0))) == pytest.approx(
        {"compute": 0.3, "offload": 0.1, "other": 0.6}
    )


def test_other_iterations_do_not_count():
    before = [("compute", "forward 0", 0.0, 1.0), ("wait cp", "shift", 0.5, 0.6)]
    after = [("compute", "forward 0", 11.0, 12.0), ("iteration", "iteration 4", 11.0, 12.0)]
    first, second = summarize([rank(*before, ("compute", "forward 0", 1.0, 2.0), *after)])
    assert (first.name, second.name) == ("iteration 3", "iteration 4")
    assert first.shares == pytest.approx({"compute": 0.1, "other": 0.9})
    assert second.shares == pytest.approx({"compute": 1.0, "other": 0.0})


def test_a_stage_that_waits_for_one_that_still_computes_is_in_the_bubble():
    """The message leaves at 4 and comes at 5: of a wait from 1 to 5, three seconds are bubble and one is exposed."""
    first = rank(("compute", "forward 0 of stage 0", 1.0, 4.0), ("pp 0>1", "send SF0@0", 4.0, 5.0))
    second = rank(
        ("pp 0>1", "receive RF0@1", 1.0, 5.0),
        ("wait pp 0>1", "receive RF0@1", 1.0, 5.0),
        ("compute", "forward 0 of stage 1", 5.0, 11.0),
    )
    assert shares(first) == pytest.approx({"compute": 0.3, "other": 0.7})
    found = shares(first, second)
    assert found == pytest.approx({"compute": 0.45, "pp": 0.05, "bubble": 0.15, "other": 0.35})


def test_the_second_message_of_a_line_is_the_second_send():
    sends = [("pp 0>1", "send SF0@0", 2.0, 2.1), ("pp 0>1", "send SF1@0", 6.0, 6.1)]
    receives = [("pp 0>1", "receive RF0@1", 1.0, 2.1), ("pp 0>1", "receive RF1@1", 1.0, 6.1)]
    waits = [("wait pp 0>1", "receive RF0@1", 2.0, 2.1), ("wait pp 0>1", "receive RF1@1", 5.0, 6.1)]
    found = shares(rank(*sends), rank(*receives, *waits))
    assert found["bubble"] == pytest.approx(0.05) and found["pp"] == pytest.approx(0.01)


def test_waiting_for_all_stages_at_the_end_is_bubble_and_for_a_send_is_not():
    found = shares(rank(("wait pp", "all_reduce", 9.0, 10.0), ("wait pp 0>1", "send SF0@0", 10.0, 10.5)))
    assert found == pytest.approx({"compute": 0.0, "pp": 0.05, "bubble": 0.1, "other": 0.85})


def test_the_slowest_rank_gives_the_time():
    slow = [FinishedSpan("iteration", "iteration 3", 1.0, 13.0), FinishedSpan("compute", "forward 0", 1.0, 13.0)]
    (summary,) = summarize([rank(), slow])
    assert format_summary(summary) == "where iteration 3 went: 12000.0 ms | compute 50.0% | other 50.0%"


def test_an_iteration_that_a_rank_did_not_record_is_left_out():
    assert summarize([rank(), []]) == []
