"""Changes to the logits of one request before a token is chosen: penalties on what it has said, and biases of
tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """presence and frequency: taken from the logit of each new token once, and as often as it occurs (OpenAI's).
    repetition: a factor that moves the logits of the prompt's and the new tokens towards minus infinity if it is above
    1 (CTRL, arXiv 1909.05858). bias: added to logits, by token.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)


NO_PENALTIES = Penalties()


class LogitChanges:
    """The changes for one request, which follow its tokens."""

    def __init__(
        self, penalties: Penalties, prompt: Sequence[int], *, min_tokens: int = 0, ends: Collection[int] = ()
    ) -> None:
        """ends: tokens that end the sequence; none is chosen before it has min_tokens tokens."""
        self._penalties, self._min_tokens, self._ends = penalties, min_tokens, sorted(ends)
        self._repeated = set(prompt) if penalties.repetition != 1.0 else set()
        self._counts: Counter[int] = Counter()
        self._bias = sorted(penalties.bias.items())
        says = penalties.presence or penalties.frequency or penalties.repetition != 1.0
        self.is_needed = bool(says or self._bias or (min_tokens and self._ends))

    def add(self, token: int) -> None:
        """Counts a new token."""
        self._counts[token] += 1

    def changed(self, logits: Tensor) -> Tensor:
        """logits [v] -> changed ones in fp32, a new tensor."""
        logits, penalties = logits.float().clone(), self._penalties
        if penalties.repetition != 1.0:
            seen = _indices([i for i in self._repeated | self._counts.keys() if i < len(logits)], logits)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
        if self._counts and (penalties.presence or penalties.frequency):
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            said = _indices(list(self._counts), logits)
            logits[said] -= penalties.presence + penalties.frequency * counts
        if self._bias:
            tokens, biases = zip(*self._bias, strict=True)
            logits[_indices(tokens, logits)] += torch.tensor(biases, device=logits.device)
        if self._counts.total() < self._min_tokens:
            # Finite, so that a distribution is left where every token is an end.
            logits[_indices([i for i in self._ends if i < len(logits)], logits)] = torch.finfo(torch.float32).min
        return logits


def _indices(tokens: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
