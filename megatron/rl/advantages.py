"""Advantages from rewards of groups: the samples of one prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """Returns whether the rewards [groups, samples] of a group differ, bool [groups].

    A group of equal rewards has advantages 0. DAPO (arXiv 2503.14476) draws other prompts in place of such groups. A
    group of one sample has no baseline and always has a signal, as in verl.
    """
    if rewards.shape[1] == 1:
        return torch.ones(len(rewards), dtype=torch.bool, device=rewards.device)
    return rewards.amax(1) > rewards.amin(1)


def grpo(rewards: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Returns (R - mean) / (std + epsilon) within each group, fp32 [groups, samples]: GRPO (arXiv 2402.03300).

    The standard deviation has n - 1. A group of one sample has mean 0 and standard deviation 1, as in verl.
    """
    if rewards.shape[1] == 1:
        return rewards.float()
    deviation = rewards.double().std(dim=1, keepdim=True)
    return (_from_mean(rewards) / (deviation + epsilon)).float()


def dr_grpo(rewards: Tensor) -> Tensor:
    """Returns R - mean within each group, fp32 [groups, samples]: Dr. GRPO (arXiv 2503.20783).

    A group of one sample has mean 0.
    """
    if rewards.shape[1] == 1:
        return rewards.float()
    return _from_mean(rewards).float()


def rloo(rewards: Tensor) -> Tensor:
    """Returns R less the mean of the other samples of its group, fp32 [groups, samples]: RLOO (arXiv 2402.14740).

    A group of one sample has no others, and keeps its reward.
    """
    samples = rewards.shape[1]
    if samples == 1:
        return rewards.float()
    return (_from_mean(rewards) * (samples / (samples - 1))).float()


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _from_mean(rewards: Tensor) -> Tensor:
    """Returns R - mean within each group, fp64. It is exactly 0 without a signal, where a rounded mean would leave
    differences that GRPO divides by a standard deviation just as small."""
    values = rewards.double()
    return torch.where(has_signal(rewards)[:, None], values - values.mean(dim=1, keepdim=True), 0.0)


def moments(advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns the number, sum and sum of squares of the advantages of tokens where the mask is 1, fp64 [3].

    The caller sums them over dp for `whiten`.
    """
    inside = mask > 0
    values = torch.where(inside, advantages.double(), 0)
    return torch.stack([inside.sum().double(), values.sum(), values.square().sum()])


def whiten(advantages: Tensor, totals: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Returns (A - mean) / sqrt(variance + epsilon), fp32 in the shape of A, over the tokens of the global batch.

    totals: `moments`, summed over the global batch. The variance has n - 1. On rewards it gives the advantages of
    REINFORCE++ (arXiv 2501.03262), and on those of `dr_grpo` those of its variant with a baseline.
    """
    number, total, squares = totals.unbind()
    mean = total / number.clamp(min=1)
    variance = ((squares - total * mean) / (number - 1).clamp(min=1)).clamp(min=0)
    return ((advantages.double() - mean) / (variance + epsilon).sqrt()).float()


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns DAPO's soft punishment of long responses (arXiv 2503.14476), fp32 in the shape of lengths.

    It is added to rewards: 0 up to max_length - buffer tokens, falling linearly to -1 at max_length and beyond.
    """
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()


def distillation_advantages(teacher: Tensor, log_probs: Tensor) -> Tensor:
    """Returns teacher - log_probs in their shape, without a gradient: on-policy distillation.

    As advantages of `policy_gradient_loss` on tokens that the student sampled, they give the gradient of the reverse KL
    divergence of the student from the teacher, token by token (Thinking Machines Lab; verl, slime).
    """
    return (teacher - log_probs).detach()
