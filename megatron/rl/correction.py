"""Corrections for tokens whose sampler had other probabilities than the trainer: other kernels, or older parameters.

Each takes rho = exp(old - sampler), per token, or per sequence: the product over its tokens ("sequence") or the
geometric mean ("geometric"). With the same kernels and parameters on both sides rho is 1, and nothing changes.

A rejected token or sequence has no part in the objective, so it must not be counted in the denominators either:
`dataclasses.replace(experience, mask=correction.mask)` comes before `local_counts`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.rl.divergence import EXPONENT_LIMIT
from megatron.rl.experience import Experience, Level, at_level


class Correction(NamedTuple):
    """weights: constant factors of the policy losses of tokens. mask: the tokens that are left to train on, as
    Experience.mask. Both are fp32 in the shape of the mask."""

    weights: Tensor
    mask: Tensor


def sampler_ratio(experience: Experience, level: Level) -> Tensor:
    """Returns rho of each token, 1 where the mask is 0. The exponent is limited to +-20."""
    difference = at_level(experience.old - experience.sampler, experience, level)
    return difference.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def truncate(experience: Experience, level: Level, cap: float = 2.0, floor: float = 0.0) -> Correction:
    """Returns weights max(floor, min(rho, cap)) and the mask as it is: truncated importance sampling (verl, slime: cap
    2, floor 0).

    The level is "token" or "sequence" in the literature.
    """
    return Correction(sampler_ratio(experience, level).clamp(floor, cap), experience.mask)


def icepop(experience: Experience, level: Level, low: float = 0.5, high: float = 5.0) -> Correction:
    """Returns weights rho, and the mask without tokens whose rho lies outside low to high.

    Per token it is IcePop (arXiv 2510.18855), whose bounds are 0.5 and 5; per sequence it is TRL's "sequence_mask".
    """
    ratio = sampler_ratio(experience, level)
    mask = _inside(experience.mask, ratio, low, high)
    return Correction(ratio * mask, mask)


def reject(experience: Experience, level: Level, low: float, high: float) -> Correction:
    """Returns weights 1, and the mask without tokens whose rho lies outside low to high: rejection sampling of verl.

    It also combines with `truncate`: the weights of one, and the mask of the other.
    """
    mask = _inside(experience.mask, sampler_ratio(experience, level), low, high)
    return Correction(torch.ones_like(mask), mask)


def _inside(mask: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), mask, 0)
