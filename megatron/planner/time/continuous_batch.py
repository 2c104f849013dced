"""The batch of the engine that samples answers, step by step: which forwards it runs for answers of given lengths.

The rules are those of core/inference/engine/continuous_batching.py: answers begin in their order, prompts are read
together up to a number of tokens, and an answer that ends leaves its row to the next one. At the end the longest answers
run alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.spec.work_space import PROMPT_TOKENS


@dataclass(frozen=True)
class Reading:
    """A forward over prompts. prompts: their number."""

    prompts: int


@dataclass(frozen=True)
class Decoding:
    """Forwards of a token of each of `rows` answers, `steps` times. columns: of the cache that a step reads, on
    average."""

    rows: int
    steps: int
    columns: float


@dataclass(frozen=True)
class Batching:
    """All forwards of a rollout."""

    readings: tuple[Reading, ...]
    decodings: tuple[Decoding, ...]

    @property
    def steps(self) -> int:
        """Forwards of one token per answer."""
        return sum(part.steps for part in self.decodings)

    @property
    def mean_rows(self) -> float:
        """Answers of a decoding step, on average."""
        return sum(part.rows * part.steps for part in self.decodings) / max(1, self.steps)

    @property
    def steps_of_tail(self) -> int:
        """Decoding steps in which less than half of the largest number of answers run."""
        most = max((part.rows for part in self.decodings), default=0)
        return sum(part.steps for part in self.decodings if part.rows < most / 2)


def batching(lengths: Sequence[int], slots: int, prompt: int) -> Batching:
    """Returns the forwards for answers with these numbers of tokens to prompts of `prompt` tokens.

    The first token of an answer follows from its prompt, so a decoding step is one for each further one.
    """
    waiting, running = list(reversed(lengths)), list[int]()  # of running answers: tokens that are missing
    read, written = [], list[int]()  # tokens of each running answer
    decodings: list[Decoding] = []
    while waiting or running:
        tokens = 0
        while waiting and len(running) < slots and tokens < PROMPT_TOKENS:
            count = min(len(waiting), slots - len(running), max(1, (PROMPT_TOKENS - tokens) // prompt))
            read.append(Reading(count))
            begun = [waiting.pop() for _ in range(count)]
            running += [length - 1 for length in begun if length > 1]
            written += [1 for length in begun if length > 1]
            tokens += count * prompt
        if not running:
            continue
        # Until an answer ends nothing changes, unless more prompts could be read now.
        more = waiting and len(running) < slots
        steps = 1 if more else min(running)
        decodings.append(Decoding(len(running), steps, prompt + max(written) + (steps + 1) / 2))
        pairs = [(left - steps, done + steps) for left, done in zip(running, written, strict=True) if left > steps]
        running, written = [left for left, _ in pairs], [done for _, done in pairs]
    return Batching(tuple(read), tuple(decodings))


def lengths_of_mean(mean: float, longest: int, count: int, seed: int = 1) -> list[int]:
    """Returns lengths of answers that end at each token with the same probability, at most `longest`, in any order.

    They are the quantiles of that distribution, whose mean is `mean` to within the rounding of each.
    """
    if mean >= longest:
        return [longest] * count
    low, high = 1e-9, 1.0
    for _ in range(60):  # of the probability to end
        ends = (low + high) / 2
        low, high = (ends, high) if (1 - (1 - ends) ** longest) / ends > mean else (low, ends)
    quantiles = [(number + 0.5) / count for number in range(count)]
    lengths = [min(longest, max(1, math.ceil(math.log1p(-part) / math.log1p(-ends)))) for part in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths
