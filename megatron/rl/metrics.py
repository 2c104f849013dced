"""Figures for the log of a step, as sums that can be all-reduced.

Functions return fp64 [] tensors by name. The caller stacks the values, sums them over dp, and divides by the number
that comes first. `largest_difference` needs a maximum instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.rl.divergence import k1, k3
from megatron.rl.experience import Experience
from megatron.rl.objectives import ClipRange, PolicyLoss
from megatron.rl.preferences import PreferencePairs


def policy_sums(
    log_probs: Tensor, experience: Experience, policy_loss: PolicyLoss, clip: ClipRange
) -> dict[str, Tensor]:
    """Returns sums over the tokens where the mask is 1, after their number "tokens".

    "ratio": that of policy_loss. "clip-low", "clip-high": tokens whose ratio left the interval in the direction in
    which their advantage drives it, so that PPO has no gradient for them. "entropy": -log p, whose mean
    estimates it. "sampler-k3": k3 between sampler and trainer. With a reference model, "reference-k1" and
    "reference-k3": estimates of the KL divergence from it. With a teacher "teacher-k1", of that from the teacher.
    """
    ratio, advantages = policy_loss.ratio(log_probs, experience), experience.advantages
    values = {
        "tokens": torch.ones_like(log_probs),
        "ratio": ratio,
        "clip-low": (ratio < 1.0 - clip.low) & (advantages < 0),
        "clip-high": (ratio > 1.0 + clip.high) & (advantages > 0),
        "entropy": -log_probs,
        "sampler-k3": k3(experience.sampler, experience.old),
    }
    if experience.reference is not None:
        values["reference-k1"] = k1(log_probs, experience.reference)
        values["reference-k3"] = k3(log_probs, experience.reference)
    if experience.teacher is not None:
        values["teacher-k1"] = k1(log_probs, experience.teacher)
    inside = experience.mask > 0
    return {name: torch.where(inside, value, 0).double().sum() for name, value in values.items()}


def largest_difference(experience: Experience) -> Tensor:
    """Returns the largest |old - sampler| of a token where the mask is 1, fp32 []; 0 without such a token.

    The largest value over dp is that of the global batch.
    """
    return torch.where(experience.mask > 0, (experience.old - experience.sampler).abs(), 0).max()


def preference_sums(log_probs: Tensor, pairs: PreferencePairs, beta: float) -> dict[str, Tensor]:
    """Returns sums over pairs, after their number "pairs": DPO's implicit rewards beta x sum of log p - reference.

    "chosen", "rejected": the rewards of the responses. "margin": their difference. "accuracy": pairs whose chosen
    response has the higher reward.
    """
    rewards = beta * pairs.sums(log_probs - pairs.reference)
    chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
    values = {
        "pairs": torch.ones_like(chosen),
        "chosen": chosen,
        "rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).double(),
    }
    return {name: value.sum() for name, value in values.items()}
