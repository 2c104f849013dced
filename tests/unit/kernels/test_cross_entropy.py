"""Sharded cross entropy: statistics and gradient of any cut of the vocabulary against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.ops import cross_entropy
from megatron.kernels.ops.cross_entropy import gradient_, local_statistics
from megatron.kernels.ops.softcap import softcap_
from tests.unit.kernels.close import random

N, V = 23, 40


def combine(parts):
    """(log-sum-exp, target's logit) of the whole vocabulary from the statistics [3, n] of its shards."""
    largest = torch.stack([p[0] for p in parts]).amax(0)
    total = sum(p[1] * (p[0] - largest).exp() for p in parts)
    return total.log() + largest, sum(p[2] for p in parts)


def loss_and_gradient(logits, targets, cuts, grad, softcap=None):
    """With the vocabulary cut at `cuts`; of logits that were capped."""
    ranges = list(zip([0, *cuts], [*cuts, logits.shape[1]]))
    log_sum_exp, target = combine([local_statistics(logits[:, a:b], targets, a) for a, b in ranges])
    pieces = [gradient_(logits[:, a:b].clone(), targets, a, log_sum_exp, grad, softcap) for a, b in ranges]
    return log_sum_exp - target, torch.cat(pieces, dim=1)


def expected(logits, targets, grad, softcap=None):
    """In fp64; the loss and the gradient of the logits before they are capped."""
    logits = logits.double().requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(capped, targets, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, logits, grad.double())[0]


@pytest.mark.parametrize("cuts", [[], [20], [10, 20, 30], [1, 39], [0, 17, 17, 40]])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_against_torch(cuts, scale):
    """Shards may be empty, and logits so far apart that exp of them would overflow."""
    logits, targets = random(N, V, scale=scale), torch.arange(N) * 7 % V
    grad = random(N, seed=1)
    loss, gradient = loss_and_gradient(logits, targets, cuts, grad)
    true_loss, true_gradient = expected(logits, targets, grad)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-6, atol=1e-6 * max(1.0, scale))
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=1e-6 * max(1.0, scale / 10))


@pytest.mark.parametrize("cuts", [[], [20], [0, 17, 17, 40]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_logits(cuts, dtype):
    """The gradient passes through the cap; of halves it is rounded once, as the capped logits are."""
    logits, targets, grad = random(N, V, scale=3.0).to(dtype), torch.arange(N) * 7 % V, random(N, seed=1)
    loss, gradient = loss_and_gradient(softcap_(logits.clone(), 2.5), targets, cuts, grad, 2.5)
    true_loss, true_gradient = expected(logits, targets, grad, 2.5)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), true_loss, rtol=4 * rounding, atol=4 * rounding)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=4 * rounding, atol=4 * rounding)
    assert not torch.allclose(true_gradient, expected(softcap_(logits.clone(), 2.5), targets, grad)[1], rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The statistics are fp32; the gradient is rounded once."""
    logits, targets = random(N, V, scale=3.0).to(dtype), torch.arange(N) % V
    grad = random(N, seed=1)
    loss, gradient = loss_and_gradient(logits, targets, [13], grad)
    true_loss, true_gradient = expected(logits, targets, grad)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_size_does_not_matter(monkeypatch, dtype):
    logits, targets, grad = random(N, V).to(dtype), torch.arange(N) % V, random(N, seed=1)
    whole = loss_and_gradient(logits, targets, [13], grad)
    for block in (1, 3 * 27, 1 << 20):
        monkeypatch.setitem(cross_entropy.CROSS_ENTROPY_BLOCK, "cpu", block)
        for a, b in zip(loss_and_gradient(logits, targets, [13], grad), whole, strict=True):
            assert a.equal(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_leave_the_logits_alone(dtype):
    logits = random(N, V).to(dtype)
    before = logits.clone()
    found = local_statistics(logits, torch.arange(N) % V, 0)
    assert logits.equal(before)
    assert found[0].equal(logits.float().amax(1))
    assert found[2].equal(logits.float()[torch.arange(N), torch.arange(N) % V])


def test_gradient_is_in_place():
    logits = random(N, V)
    assert gradient_(logits, torch.zeros(N, dtype=torch.long), 0, logits.logsumexp(1), torch.ones(N)) is logits


def test_a_target_on_another_shard_counts_nothing_here():
    found = local_statistics(random(2, 8), torch.tensor([3, 20]), 16)
    assert found[2, 0] == 0 and found[2, 1] == random(2, 8)[1, 4]
    gradient = gradient_(random(2, 8), torch.tensor([3, 20]), 16, torch.full((2,), 9.0), torch.ones(2))
    assert gradient[0].gt(0).all() and gradient[1, 4] < 0


def test_empty_shard():
    empty = torch.zeros(N, 0)
    found = local_statistics(empty, torch.zeros(N, dtype=torch.long), 40)
    assert found[0].eq(float("-inf")).all() and found[1:].eq(0).all()
    assert gradient_(empty, torch.zeros(N, dtype=torch.long), 40, torch.zeros(N), torch.ones(N)).shape == (N, 0)
