"""A calculator as an environment: it computes what the model asks for between its answers.

    python examples/rl/calculator.py --output sums.jsonl
    train_rl.py --prompt-data sums.jsonl --custom-environment-path examples/rl/calculator.py \
        --custom-rm-path examples/rl/calculator.py ...

The model calls the tool in the form that Qwen and many other models learn:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}
    </tool_call>

`next_turn` answers every call of an answer by a message of the role "tool", and ends the conversation behind an answer
without a call. The chat template has to write tools and such messages. `reward` gives 1 if the last answer ends in the
number of the label, and counts the calls for the log.

The state of an environment is the conversation alone: it is called in several processes, each time with all of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
LONGEST = 200  # characters of an expression
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression of numbers with + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def next_turn(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, str]] | None:
    """Returns the results of the calls in the last answer, and None if it has no call."""
    calls = CALL.findall(conversation[-1]["content"])
    return [{"role": "tool", "content": result(call)} for call in calls] or None


def reward(conversation: Sequence[Mapping[str, Any]], label: str) -> dict[str, float]:
    """Returns 1 if the last number of the last answer is the label's, and the number of calls."""
    numbers = NUMBER.findall(conversation[-1]["content"])
    calls = sum(message["role"] == "tool" for message in conversation)
    return {"score": float(bool(numbers) and Fraction(numbers[-1]) == Fraction(label)), "calls": float(calls)}


def result(call: str) -> str:
    """Returns the value of a call's expression, or the mistake in it, which the model shall read."""
    try:
        expression = json.loads(call)["arguments"]["expression"]
        if len(expression) > LONGEST:
            raise ValueError(f"an expression may have {LONGEST} characters")
        return str(value_of(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, ZeroDivisionError, RecursionError) as error:
        return f"error: {type(error).__name__}: {error}"


def value_of(node: ast.expr) -> Fraction:
    """Returns the exact value of an expression. Raises ValueError for anything but numbers and four operations."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError(f"{type(node).__name__} is none of numbers, + - * / and parentheses")


def row(rng: random.Random) -> dict[str, Any]:
    """Returns a question whose answer needs more than one operation."""
    first, second, third = (rng.randint(11, 99) for _ in range(3))
    question = f"What is {first} * {second} - {third}? End with the number."
    return {
        "prompt": [{"role": "user", "content": question}],
        "label": str(first * second - third),
        "tools": [TOOL],
    }


def main(argv: Sequence[str]) -> int:
    """Writes prompts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the prompts")
    parser.add_argument("--prompts", type=int, default=1000, help="default 1000")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    lines = (json.dumps(row(rng)) + "\n" for _ in range(args.prompts))
    args.output.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
