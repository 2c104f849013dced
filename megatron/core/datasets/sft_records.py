"""One JSON line of instruction data -> the messages of a conversation, in one of three formats told apart by their
keys.

| format | keys |
|---|---|
| messages | `messages`: a list of {role, content} |
| ShareGPT | `conversations`: a list of {from, value} |
| Alpaca | `instruction`, `input` (may be missing or empty), `output`; also `history`: earlier [question, answer] |

All may have `system`, the text of a system turn, and `tools`. A turn of the assistant with `"weight": 0` is part of the
conversation and not trained on, as in OpenAI's format for fine-tuning
(https://platform.openai.com/docs/guides/supervised-fine-tuning). Keys that ask for another way of training, and keys
that have a newer name in that format, are rejected by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.base.read_file import parse_json
from megatron.core.datasets.jsonl import check_surrogates, parse_object

# What other programs read beside a conversation, of the record or of a turn: without it another thing would be learned.
_UNREAD = {
    **dict.fromkeys(
        ("image", "images", "image_path", "video", "videos", "audio", "audios", "objects"),
        "only text is trained on",
    ),
    **dict.fromkeys(
        (
            "chosen",
            "rejected",
            "rejected_response",
            "rejected_messages",
            "rejected_images",
            "kto_tag",
            "kto_label",
            "reward",
        ),
        "answers are not compared",
    ),
    **dict.fromkeys(("documents", "chat_template_kwargs"), "templates are given messages and tools alone"),
}
# Other programs' names for a turn's weight.
_WEIGHTS_ELSEWHERE = ("train", "training", "loss", "loss_weight", "loss_mask")
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """A conversation: `messages` are dicts with `role`, `content` and other fields that the template may read.

    `tools` are JSON schemas, if any. `untrained` holds the positions in `messages` of assistant turns that are not
    trained on.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    untrained: frozenset[int] = frozenset()


def parse_conversation(line: bytes) -> Conversation:
    """Returns the conversation in one JSON line. Raises ValueError with the reason."""
    record = parse_object(line)
    if "messages" in record:
        messages = parse_turns(record["messages"], "messages")
    elif "conversations" in record:
        messages = parse_turns(record["conversations"], "conversations")
    elif "instruction" in record:
        messages = _alpaca(record)
    else:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(f"has none of the keys messages, conversations and instruction, only {keys}")
    if record.get("functions"):
        raise ValueError("holds 'functions'; write them under 'tools'")
    _check_unread(record, "")
    for number, message in enumerate(messages, start=1):
        _check_unread(message, f" in turn {number}")
    weights = [_weight(message, number) for number, message in enumerate(messages, start=1)]
    if record.get("system") and _lacks_system(messages, _text(record["system"], "system")):
        messages.insert(0, {"role": "system", "content": record["system"]})
        weights.insert(0, 1)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    untrained = frozenset(number for number in answers if weights[number] == 0)
    if len(untrained) == len(answers):
        fault = "only turns of the assistant with weight 0" if answers else "no turn of the assistant"
        raise ValueError(f"has {fault}, so nothing to train on")
    if b"\\u" in line:
        check_surrogates([str(message["content"]) for message in messages], "content")
    return Conversation(messages, parse_tools(record.get("tools")), untrained)


def _check_unread(held: dict[str, Any], where: str) -> None:
    """Raises ValueError for a key whose content would be dropped."""
    for name, reason in _UNREAD.items():
        if held.get(name) not in (None, "", [], {}):
            raise ValueError(f"holds '{name}'{where}, and {reason}; remove it if the conversation is whole without it")


def _weight(message: dict[str, Any], number: int) -> int:
    """Removes the weight of turn `number` from it and returns it: 1 or 0."""
    for name in _WEIGHTS_ELSEWHERE:
        if message.get(name) is not None:
            raise ValueError(f"has '{name}' in turn {number}; write it as a weight of 0 or 1")
    weight = message.pop("weight", None)
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"gives turn {number} the weight {json.dumps(weight)[:40]}; give 0 or 1")
    if weight == 1 and message["role"] != "assistant":
        raise ValueError(f"gives turn {number} the weight 1, and only the assistant's turns are trained on")
    return int(weight)


def _lacks_system(messages: list[dict[str, Any]], system: str) -> bool:
    """Returns whether the record's `system` must be added as the first turn. Raises ValueError if the first turn
    differs.
    """
    if messages[0]["role"] not in ("system", "developer"):
        return True
    if messages[0]["content"] != system:
        raise ValueError(f"says '{system[:40]}' under 'system' and '{messages[0]['content'][:40]}' in its system turn")
    return False


def parse_turns(turns: Any, key: str) -> list[dict[str, Any]]:
    """Returns the messages of the turns under `key`, as {role, content} and further fields. Raises ValueError with the
    reason.
    """
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"holds no list of turns under '{key}'")
    return [_turn(turn, f"turn {number} under '{key}'") for number, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """Converts {role, content} or {from, value}; other fields, such as tool_calls, are kept for the template."""
    if not isinstance(turn, dict):
        raise ValueError(f"holds {json.dumps(turn)[:40]} as {where}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"has {where} from '{role}', which is none of {', '.join(ROLES)}")
    if turn.get("function_call"):
        raise ValueError(f"holds 'function_call' in {where.partition(' under')[0]}; write it as 'tool_calls'")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    fields = {name: value for name, value in turn.items() if name not in ("role", "content", "from", "value")}
    return {"role": ROLES[role], "content": _text(content, f"content of {where}"), **fields}


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
    for request, answer in pairs:
        messages.append({"role": "user", "content": _text(request, "question under 'history'")})
        messages.append({"role": "assistant", "content": _text(answer, "answer under 'history'")})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(record["output"], "output")})
    return messages


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Returns a list of schemas, which may also be given as JSON in a text. Raises ValueError with the reason."""
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(f"holds no JSON under 'tools' ({error})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("holds no list of objects under 'tools'")
    return tools or None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a {type(value).__name__} as {name}, not text")
    return value
