"""The cross entropy of a shard in Triton's interpreter against its reference; run by
tests/unit/kernels/test_triton.py."""

import pytest
import torch

from megatron.kernels.backends.triton import cross_entropy
from megatron.kernels.ops import cross_entropy as reference
from megatron.kernels.ops.softcap import softcap_
from tests.unit.kernels.close import random
from tests.unit.kernels.triton.near import assert_near

# Rows of one block, of several blocks and of none.
SHAPES = [(7, 40), (3, 8192 * 2 + 5), (0, 40), (5, 1), (4, 0)]


@pytest.mark.parametrize(("n", "v"), SHAPES)
@pytest.mark.parametrize("first", [0, 20, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_parity(n, v, first, softcap):
    """Targets lie on this shard, on an earlier and on a later one."""
    logits, targets, grad = random(n, v, scale=4.0), torch.arange(n) * 13 % 60, random(n, seed=1)
    if softcap is not None:
        softcap_(logits, softcap)
    found, expected = (each.local_statistics(logits, targets, first) for each in (cross_entropy, reference))
    assert_near(found, expected)
    log_sum_exp = expected[1].log() + expected[0] + 0.5  # of a vocabulary with further shards
    arguments = targets, first, log_sum_exp, grad, softcap
    ours, theirs = logits.clone(), logits.clone()
    assert cross_entropy.gradient_(ours, *arguments) is ours
    assert_near((ours,), (reference.gradient_(theirs, *arguments),))


def test_the_padding_of_the_vocabulary_is_left_alone():
    """The ids of the vocabulary are the first columns of a wider matrix."""
    padded, targets, grad = random(5, 24), torch.arange(5), random(5, seed=1)
    before, valid = padded.clone(), padded[:, :19]
    statistics = cross_entropy.local_statistics(valid, targets, 0)
    assert_near(statistics, reference.local_statistics(valid, targets, 0))
    log_sum_exp = statistics[1].log() + statistics[0]
    expected = reference.gradient_(valid.clone(), targets, 0, log_sum_exp, grad)
    cross_entropy.gradient_(valid, targets, 0, log_sum_exp, grad)
    assert_near((padded[:, :19],), (expected,))
    assert torch.equal(padded[:, 19:], before[:, 19:])


def test_logits_that_overflow_exp_or_are_masked():
    logits = random(3, 8192 + 9, scale=1e4)
    logits[0, :8192] = float("-inf")  # the whole first block
    targets = torch.tensor([8195, 1, 2])
    assert_near(cross_entropy.local_statistics(logits, targets, 0), reference.local_statistics(logits, targets, 0))


def test_not_a_number_is_not_hidden():
    logits = random(2, 12)
    logits[1, 3] = float("nan")
    largest, total, _ = cross_entropy.local_statistics(logits, torch.zeros(2, dtype=torch.int64), 0)
    assert (total.log() + largest).isnan().tolist() == [False, True]
