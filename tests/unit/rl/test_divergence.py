"""Estimators of the KL divergence: exact means over a small vocabulary."""

import torch

from megatron.rl.advantages import distillation_advantages
from megatron.rl.divergence import KL_ESTIMATORS, k2, k3
from tests.unit.rl.batches import SEEDS


def distributions(seed):
    """The logits of the policy, a leaf, and log-probabilities of policy and reference, fp64 [6]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator).double().requires_grad_()
    return logits, logits.log_softmax(0), torch.randn(6, generator=generator).double().log_softmax(0)


def mean_gradient(name, seed):
    """The mean over tokens that the policy samples of the gradient of an estimator by the logits."""
    logits, policy, reference = distributions(seed)
    estimate = (policy.exp().detach() * KL_ESTIMATORS[name](policy, reference)).sum()
    return torch.autograd.grad(estimate, logits)[0]


def gradient_of(divergence, seed):
    logits, policy, reference = distributions(seed)
    return torch.autograd.grad(divergence(policy, reference), logits)[0]


def reverse(policy, reference):
    return (policy.exp() * (policy - reference)).sum()


def forward(policy, reference):
    return (reference.exp() * (reference - policy)).sum()


def test_mean_values():
    for seed in SEEDS:
        _, policy, reference = distributions(seed)
        means = {name: (policy.exp() * estimate(policy, reference)).sum() for name, estimate in KL_ESTIMATORS.items()}
        for name in ("k1", "k3", "k3+"):
            assert torch.allclose(means[name], reverse(policy, reference), atol=1e-12)


def test_mean_gradients():
    """Only k2, and k3 with its gradient, follow the divergence; k1 has no gradient, and k3 another divergence's."""
    for seed in SEEDS:
        right = gradient_of(reverse, seed)
        assert right.abs().max() > 1e-2
        assert torch.allclose(mean_gradient("k2", seed), right, atol=1e-12)
        assert torch.allclose(mean_gradient("k3+", seed), right, atol=1e-12)
        assert mean_gradient("k1", seed).abs().max() <= 1e-12
        assert torch.allclose(mean_gradient("k3", seed), gradient_of(forward, seed), atol=1e-12)


def test_k3_is_finite_and_exact_near_zero():
    """exp(-d) - 1 + d loses all digits of small differences in fp32, and overflows for large ones."""
    small = torch.tensor([1e-3, -1e-3])
    assert torch.allclose(k3(small, torch.zeros(2)), k2(small, torch.zeros(2)), rtol=1e-3)
    assert k3(torch.tensor(-300.0), torch.tensor(0.0)).isfinite()


def test_distillation_has_the_gradient_of_the_reverse_divergence():
    for seed in SEEDS:
        logits, policy, teacher = distributions(seed)
        advantages = distillation_advantages(teacher, policy)
        assert not advantages.requires_grad
        surrogate = (policy.exp().detach() * -advantages * policy).sum()
        (gradient,) = torch.autograd.grad(surrogate, logits)
        assert torch.allclose(gradient, gradient_of(reverse, seed), atol=1e-12)
