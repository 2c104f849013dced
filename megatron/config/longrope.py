"""Parses the lists of LongRoPE: --short-factor and --long-factor, one positive number per pair of rotated channels.

The flags are those of MindSpeed-LLM, a fork of Megatron-LM: numbers separated by commas, in one word.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.config.interval import POSITIVE


def channel_factors(flag: str, text: str | None, pairs: int) -> tuple[float, ...]:
    """Returns one factor for each of `pairs` pairs of rotated channels. Raises ConfigError that names the flag."""
    if text is None:
        raise ConfigError(
            f"--position-embedding-type longrope needs {flag}: {pairs} numbers separated by commas; give it"
        )
    words = text.split(",")
    if len(words) != pairs:
        raise ConfigError(
            f"{flag} has {len(words)} numbers, and a head has {pairs} pairs of rotated channels; give {pairs} numbers "
            "separated by commas, or change --kv-channels or --rotary-percent"
        )
    factors = []
    for word in words:
        try:
            number = float(word)
        except ValueError:
            raise ConfigError(f"{flag} has '{word}', which is no number; give numbers separated by commas") from None
        if not POSITIVE.holds(number):
            raise ConfigError(f"{flag} has {word}; every number must be {POSITIVE.words} and finite")
        factors.append(number)
    return tuple(factors)


def written(factors: Sequence[float]) -> str:
    """Returns the word that `channel_factors` reads as exactly these numbers."""
    return ",".join(repr(float(factor)) for factor in factors)
