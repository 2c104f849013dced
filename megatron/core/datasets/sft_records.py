"""One JSON line of instruction data -> the messages of a conversation. Three formats, told apart by their keys.

| format | keys |
|---|---|
| messages | `messages`: a list of {role, content}; also `tools` |
| ShareGPT | `conversations`: a list of {from, value}; also `system`, `tools` |
| Alpaca | `instruction`, `input` (may be missing or empty), `output`; also `system`, `history`: earlier [question, answer] |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.jsonl import check_surrogates, parse_object

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """messages: dicts with `role`, `content` and whatever else the template may read. tools: JSON schemas, if any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def parse_conversation(line: bytes) -> Conversation:
    """The conversation in one JSON line. Raises ValueError saying what is wrong with it."""
    record = parse_object(line)
    if "messages" in record:
        messages = _turns(record["messages"], "messages")
    elif "conversations" in record:
        messages = _turns(record["conversations"], "conversations")
    elif "instruction" in record:
        messages = _alpaca(record)
    else:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(f"has none of the keys messages, conversations and instruction, only {keys}")
    if "messages" not in record and record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record["system"], "system")})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no turn of the assistant, so nothing to train on")
    if b"\\u" in line:
        check_surrogates([str(message["content"]) for message in messages], "content")
    return Conversation(messages, _tools(record.get("tools")))


def _turns(turns: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"holds no list of turns under '{key}'")
    return [_turn(turn, f"turn {number} under '{key}'") for number, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """{role, content} or {from, value}; other fields, such as tool_calls, are kept for the template."""
    if not isinstance(turn, dict):
        raise ValueError(f"holds {json.dumps(turn)[:40]} as {where}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"has {where} from '{role}', which is none of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    others = {name: value for name, value in turn.items() if name not in ("role", "content", "from", "value")}
    return {"role": ROLES[role], "content": _text(content, f"content of {where}"), **others}


def _alpaca(record: dict[str, Any]) -> list[dict[str, Any]]:
    if "output" not in record:
        raise ValueError(f"has no key 'output', only {', '.join(sorted(record))}")
    question = _text(record["instruction"], "instruction")
    if record.get("input"):
        question += "\n" + _text(record["input"], "input")
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("holds no list of [question, answer] under 'history'")
    messages: list[dict[str, Any]] = []
    for asked, answered in pairs:
        messages.append({"role": "user", "content": _text(asked, "question under 'history'")})
        messages.append({"role": "assistant", "content": _text(answered, "answer under 'history'")})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(record["output"], "output")})
    return messages


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """A list of schemas, or the same written as JSON in a text."""
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"holds no JSON under 'tools' ({error})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("holds no list of objects under 'tools'")
    return tools or None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a {type(value).__name__} as {name}, not text")
    return value
