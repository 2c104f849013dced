"""Parses the flags of sliding-window attention: the size of the window, and the layers that have it.

The flags are Megatron-LM's: --window-size LEFT,RIGHT counts the tokens other than the query's own, so that Hugging
Face's `sliding_window` W (i - j < W) is W-1,0. In --window-attn-skip-freq a 1 is a layer with the window, a 0 one
without.
"""

from __future__ import annotations

from megatron.base.errors import ConfigError
from megatron.config.layer_pattern import every_layer


def keys_in_window(size: str | None) -> int | None:
    """Returns the number of keys that a query sees, including its own; None: all up to its own. Raises ConfigError."""
    if size is None:
        return None
    try:
        left, right = (int(word) for word in size.strip().removeprefix("(").removesuffix(")").split(","))
    except ValueError:
        raise ConfigError(
            f"--window-size {size} must be LEFT,RIGHT, two whole numbers; give 4095,0 for a window of 4096 tokens"
        ) from None
    if right != 0:
        raise ConfigError(f"--window-size {size} looks ahead, but attention is causal; give {left},0")
    if left < -1:
        raise ConfigError(f"--window-size {size}: LEFT must be 0 or more, or -1 for no limit, got {left}")
    return None if left == -1 else left + 1


def attention_windows(size: str | None, skip: str | None, num_layers: int) -> tuple[int | None, ...]:
    """Returns `keys_in_window` of each layer; `skip` is --window-attn-skip-freq. Raises ConfigError."""
    window = keys_in_window(size)
    if window is None or skip is None:
        return (window,) * num_layers
    chosen = every_layer("--window-attn-skip-freq", skip, num_layers, nth=0)
    return tuple(window if has_window else None for has_window in chosen)
