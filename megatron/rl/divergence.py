"""Estimators of the KL divergence of the policy from the reference model, on sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# [Note: KL estimators]
# Schulman, "Approximating KL divergence": with d = log p - log q of a token that was sampled from p, k1 = d,
# k2 = d^2 / 2 and k3 = exp(-d) - 1 + d. The means of k1 and k3 are KL(p || q); k3 is never negative and varies less. As
# a term of the loss an estimator acts by its gradient, and there only k2 is right: the mean of its gradient
# d x grad log p is grad KL(p || q). The mean is 0 for k1, and the gradient of KL(q || p) for k3.

EXPONENT_LIMIT = 20.0  # of exponents of log-ratios, as in verl: exp(20) = 4.9e8


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d = log_probs - reference in their shape: k1 of [Note: KL estimators]."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d^2 / 2 in the shape of the arguments: k2 of [Note: KL estimators]."""
    return (log_probs - reference).square() / 2


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns exp(-d) - 1 + d in the shape of the arguments: k3 of [Note: KL estimators], GRPO's (arXiv 2402.03300).

    d is limited to +-20, and without a gradient beyond.
    """
    difference = (log_probs - reference).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (-difference).expm1() + difference


def k3_with_gradient_of_k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns the value of k3 with the gradient of k2: verl's "k3+". See [Note: KL estimators]."""
    right = k2(log_probs, reference)
    return right - right.detach() + k3(log_probs, reference).detach()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_with_gradient_of_k2,
}
