"""Parses the flags that describe layers: a choice per layer, windows, the factors of LongRoPE, projections with LoRA.

A choice per layer in Megatron-LM's notation is "every N-th layer", or a list of 0 and 1. A list may be written with +
and *, as in ([1]*5+[0])*4. It is parsed, never executed: only these two operators are allowed.

The flags of sliding-window attention are Megatron-LM's: --window-size LEFT,RIGHT counts the tokens other than the
query's own, so that Hugging Face's `sliding_window` W (i - j < W) is W-1,0. In --window-attn-skip-freq a 1 is a layer
with the window, a 0 one without.

The flags of LongRoPE, --short-factor and --long-factor, are those of MindSpeed-LLM, a fork of Megatron-LM: one positive
number per pair of rotated channels, separated by commas, in one word. --lora-target-modules takes PEFT's names of
projections, and names of fused layers for all of their projections.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.config.interval import POSITIVE

_WANTED = "is neither a whole number N nor a list of 0 and 1 such as [1,1,0] or ([1]*2+[0])*4"
GROUPED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # of attention with grouped heads
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # of latent attention alone
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")  # of gated delta nets
PROJECTIONS = (
    *("q_proj", *LATENT_PROJECTIONS, *GROUPED_PROJECTIONS[1:]),
    *("gate_proj", "up_proj", "down_proj"),
    *DELTA_PROJECTIONS,
)
_FUSED = {
    "all-linear": PROJECTIONS,
    "linear_qkv": ("q_proj", *LATENT_PROJECTIONS, "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "in_proj": DELTA_PROJECTIONS[:-1],
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
LORA_TARGETS = (*PROJECTIONS, *_FUSED)


def layer_pattern(text: str, num_layers: int) -> int | tuple[int, ...]:
    """Returns N, or one 0 or 1 per layer. Raises ValueError with the reason, to be printed after the flag and
    `text`."""
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body, num_layers)
    except (SyntaxError, RecursionError, MemoryError):  # the parser's own limits on nesting
        raise ValueError(_WANTED) from None
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError("must be 1 or more")
        return pattern
    if len(pattern) != num_layers:
        raise ValueError(_wrong_length(len(pattern), num_layers))
    if not set(pattern) <= {0, 1}:
        raise ValueError(_WANTED)
    return tuple(pattern)


def every_layer(flag: str, text: str, num_layers: int, *, nth: int) -> tuple[int, ...]:
    """Returns a choice per layer, 1 or 0; a number N stands for `nth` in every N-th layer and 1 - nth in the others.

    Raises ConfigError that names the flag.
    """
    try:
        pattern = layer_pattern(text, num_layers)
    except ValueError as error:
        raise ConfigError(f"{flag} {text} {error}") from None
    if isinstance(pattern, int):
        return tuple(1 - nth if (layer + 1) % pattern else nth for layer in range(num_layers))
    return pattern


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


def lora_projections(names: Sequence[str], *, attention: Sequence[str], gated: bool) -> tuple[str, ...]:
    """Returns the projections with an adapter, in the order of a layer. attention: the projections that attention has.
    gated: the MLP has a gate. Raises ConfigError.
    """
    absent = {*GROUPED_PROJECTIONS, *LATENT_PROJECTIONS, *DELTA_PROJECTIONS} - set(attention)
    for name in names:
        if absent.issuperset(_FUSED.get(name, (name,))):
            raise ConfigError(
                f"--lora-target-modules {name}: attention of this model has {', '.join(attention)}; name these, or "
                "linear_qkv for all but o_proj"
            )
    requested = {projection for name in names for projection in _FUSED.get(name, (name,))} - absent
    if not gated:
        if "gate_proj" in names:
            raise ConfigError(
                "--lora-target-modules gate_proj: this MLP has no gate; remove it, or add --swiglu or --geglu"
            )
        requested.discard("gate_proj")
    return tuple(projection for projection in PROJECTIONS if projection in requested)


def _value(node: ast.expr, longest: int) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            numbers = [_value(element, longest) for element in elements]
            if all(isinstance(number, int) for number in numbers):
                return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left, longest), _value(right, longest)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left, longest), _value(right, longest)
            if isinstance(first, int) and isinstance(second, list):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                return _repeated(first, second, longest)
    raise ValueError(_WANTED)


def _repeated(part: list[int], times: int, longest: int) -> list[int]:
    """Repeats a list after checking its length: [1]*1000000000 is a typing error, not a reason to run out of memory."""
    if len(part) * times > longest:
        raise ValueError(_wrong_length(len(part) * times, longest))
    return part * times


def _wrong_length(length: int, num_layers: int) -> str:
    return f"is for {length} layers, but --num-layers is {num_layers}; give one 0 or 1 per layer"
