"""From logits to the next token: temperature, top-k, top-p, and the random draw.

Top-p (nucleus) sampling: Holtzman et al., arXiv 1904.09751.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings for choosing the next token. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are no limits.

    min_p: least probability of a token that is drawn, as a part of that of the likeliest one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that is out of range or has no effect."""
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature:g} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} must be 0 (no limit) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"--top-p {self.top_p:g} must be above 0 and at most 1 (no limit)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"--min-p {self.min_p:g} must be from 0 (no limit) to 1")
        if self.greedy and (self.top_k or self.top_p < 1.0):
            raise ConfigError("--top-k and --top-p have no effect at --temperature 0 (greedy); remove them or raise it")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a random draw."""
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the distribution to draw from for logits [b, v], float64 [b, v]; zero for excluded tokens.

    The temperature is applied first, then the top_k likeliest are kept, of these the ones that min_p allows, and of
    these the smallest set whose sum reaches top_p; the rest is renormalised. Tokens as likely as the last one that
    top_k keeps are kept, too.
    """
    assert not sampling.greedy
    # The maximum is subtracted first, so that a tiny temperature gives zeros and not infinities. float64 makes the sum
    # over a vocabulary accurate.
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if sampling.min_p > 0.0:  # the likeliest token is at 0
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -math.inf)
    weights = scaled.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        cut = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        weights = weights.masked_fill(cut, 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def choose(logits: Tensor, sampling: Sampling, draws: Tensor | None) -> Tensor:
    """Returns ids [b] for logits [b, v]. `draws` is float64 [b], uniform in [0, 1), or None if greedy.

    The chosen token is the first whose cumulative probability exceeds the draw: logits that differ in their last bits
    (another tp or batch) give another token only if the draw is that close to a boundary.
    """
    if draws is None:
        return logits.argmax(dim=-1)
    summed = probabilities(logits, sampling).cumsum(dim=-1)
    # The division makes the last sum exactly 1, above every draw: a token of probability 0 is never taken.
    return torch.searchsorted(summed / summed[:, -1:], draws[:, None], right=True).squeeze(-1)


class Draws:
    """Uniform random numbers, one stream per sequence: they depend on the sequence's seed alone, not on its batch."""

    def __init__(self, seeds: list[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def next(self) -> Tensor:
        """Returns one number per sequence, float64 [b] on the CPU, so that a seed gives the same on every device."""
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=g) for g in self._generators])
