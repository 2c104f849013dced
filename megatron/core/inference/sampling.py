"""From logits to the next token: temperature, top-k, top-p, and the draw.

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
    """How the next token is chosen. Temperature 0 takes the likeliest token; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range, or one without effect."""
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature:g} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} must be 0 (no limit) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"--top-p {self.top_p:g} must be above 0 and at most 1 (no limit)")
        if self.greedy and (self.top_k or self.top_p < 1.0):
            raise ConfigError("--top-k and --top-p have no effect at --temperature 0 (greedy); remove them or raise it")

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken and nothing is drawn."""
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [b, v] -> the distribution that is drawn from, float64 [b, v]; zero for tokens that are cut.

    First the temperature, then the top_k likeliest, then the smallest set of these whose total reaches top_p; the rest
    is renormalised. Tokens as likely as the last one that top_k keeps are kept too.
    """
    assert not sampling.greedy
    # Subtracted first, so that a tiny temperature gives zeros and not infinities. Float64: a vocabulary is summed up.
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    kept = scaled.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = kept.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        cut = torch.zeros_like(kept, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        kept = kept.masked_fill(cut, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def choose(logits: Tensor, sampling: Sampling, draws: Tensor | None) -> Tensor:
    """logits [b, v] -> ids [b]. draws: float64 [b], uniform in [0, 1); None where greedy.

    The draw is where the summed probabilities first pass it: logits that differ in their last bits (another tp, another
    batch) give another token only when the draw falls as close to a border.
    """
    if draws is None:
        return logits.argmax(dim=-1)
    summed = probabilities(logits, sampling).cumsum(dim=-1)
    # Dividing makes the last sum exactly 1, which no draw reaches: a token of probability 0 is never taken.
    return torch.searchsorted(summed / summed[:, -1:], draws[:, None], right=True).squeeze(-1)


class Draws:
    """Uniform numbers, a stream for each sequence: what one draws depends on its seed alone, not on its batch."""

    def __init__(self, seeds: list[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def next(self) -> Tensor:
        """One number a sequence, float64 [b] on the CPU, so that a seed means the same on every device."""
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=g) for g in self._generators])
