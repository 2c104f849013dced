"""Parses a choice per layer in Megatron-LM's notation: "every N-th layer", or a list of 0 and 1.

A list may be written with + and *, as in ([1]*5+[0])*4. It is parsed, never executed: only these two operators are
allowed.
"""

from __future__ import annotations

import ast

from megatron.base.errors import ConfigError

_WANTED = "is neither a whole number N nor a list of 0 and 1 such as [1,1,0] or ([1]*2+[0])*4"


def layer_pattern(text: str, num_layers: int) -> int | tuple[int, ...]:
    """Returns N, or one 0 or 1 per layer. Raises ValueError with the reason, to be printed after the flag and `text`."""
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
