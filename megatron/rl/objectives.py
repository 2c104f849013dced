"""Objectives of reinforcement learning as functions of log-probabilities, and their gradients as weights of tokens.

[Note: two passes]
A step computes log-probabilities of the sampled tokens without gradients. An objective is a differentiable function of
them alone, so its gradient g_t by the log-probability of token t is a cheap computation over [b, s] numbers. A training
pass follows on the same parameters, with the loss  sum over t of w_t * (-log p_t)  and constant weights w_t = -g_t. By
the chain rule its gradient by the parameters is the objective's. So tokens of one sequence, and sequences of one pair,
may lie in different microbatches, and an objective needs no code in the model. The value of the objective comes from
the first pass; the loss of the second one means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.rl.divergence import EXPONENT_LIMIT
from megatron.rl.experience import Experience, at_level


def as_token_weights(objective: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the objective's value [] and the weights w_t of the training pass, in the shape of log_probs.

    objective: takes log-probabilities to a number that is to be minimised. See [Note: two passes].
    """
    leaf = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        value = objective(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), -gradient


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The interval 1 - low to 1 + high of the ratio, and the constant c of dual clipping; None: no dual clipping.

    PPO has low = high = 0.2; DAPO's clip-higher (arXiv 2503.14476) is 0.2 and 0.28; GSPO (arXiv 2507.18071) takes 3e-4
    and 4e-4; CISPO has no lower bound, which is low = 1. verl's c is 3.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def clamp(self, ratio: Tensor) -> Tensor:
        """Returns the ratio limited to the interval."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


def token_ratio(log_probs: Tensor, experience: Experience) -> Tensor:
    """Returns r_t = exp(log p_t - old_t) of each token, 1 where the mask is 0; the exponent is limited to +-20."""
    difference = at_level(log_probs - experience.old, experience, "token")
    return difference.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def sequence_ratio(log_probs: Tensor, experience: Experience) -> Tensor:
    """Returns GSPO's ratio of sequences s_i = exp(mean over the sequence of log p_t - old_t), at each of its tokens.

    It is the token form exp(log p_t - sg(log p_t) + sg(log s_i)) of arXiv 2507.18071, where sg stops gradients. Its
    value is s_i, and its gradient by log p_t is s_i, too: the mean over a sequence has the gradient of s_i itself. The
    exponent is limited to +-20.
    """
    mean = at_level((log_probs - experience.old).detach(), experience, "geometric")
    return (log_probs - log_probs.detach() + mean.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)).exp()


def ppo_loss(ratio: Tensor, _log_probs: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Returns max(-A r, -A clamp(r, 1 - low, 1 + high)) of each token: PPO (arXiv 1707.06347).

    With dual clipping (arXiv 1912.09729) the loss of a token with A < 0 is at most -A c.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * clip.clamp(ratio))
    if clip.dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)


def cispo_loss(ratio: Tensor, log_probs: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Returns -sg(clamp(r, 1 - low, 1 + high)) A log p of each token: CISPO (arXiv 2506.13585).

    Tokens beyond the interval keep a gradient, in contrast to PPO.
    """
    return -clip.clamp(ratio.detach()) * advantages * log_probs


def policy_gradient_loss(_ratio: Tensor, log_probs: Tensor, advantages: Tensor, _clip: ClipRange) -> Tensor:
    """Returns -A log p of each token: REINFORCE. With `distillation_advantages` it is on-policy distillation."""
    return -advantages * log_probs


class PolicyLoss(NamedTuple):
    """A loss of tokens, with the ratio that it clips.

    ratio: (log_probs, experience) -> ratio. loss: (ratio, log_probs, advantages, clip) -> loss, all in one shape.
    """

    ratio: Callable[[Tensor, Experience], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor, ClipRange], Tensor]


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(token_ratio, ppo_loss),
    "gspo": PolicyLoss(sequence_ratio, ppo_loss),
    "cispo": PolicyLoss(token_ratio, cispo_loss),
    "reinforce": PolicyLoss(token_ratio, policy_gradient_loss),
}


def policy_objective(
    log_probs: Tensor,
    experience: Experience,
    policy_loss: PolicyLoss,
    clip: ClipRange,
    weights: Tensor,
    *,
    correction: Tensor | None = None,
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None,
    divergence_coefficient: float = 0.0,
) -> Tensor:
    """Returns this replica's part of the objective to minimise, fp64 []: sum over t of a_t (c_t loss_t + beta KL_t).

    weights a_t: `aggregation_weights` of experience. correction c_t: `Correction.weights`; None: 1 everywhere.
    divergence: an estimator of KL_ESTIMATORS, for KL_t of log_probs from experience.reference; None: without this term.
    divergence_coefficient: beta. The parts of all replicas and of any cut into microbatches add up to the objective of
    the global batch.
    """
    ratio = policy_loss.ratio(log_probs, experience)
    loss = policy_loss.loss(ratio, log_probs, experience.advantages, clip)
    if correction is not None:
        loss = loss * correction
    if divergence is not None:
        assert experience.reference is not None, "a KL term needs log-probabilities of the reference model"
        loss = loss + divergence_coefficient * divergence(log_probs, experience.reference)
    return (loss * weights).double().sum()
