"""Chat templates that are not part of a tokenizer: a built-in one, one from a file, or one given as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError

# ChatML (https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md) with two changes, so that it suits a
# tokenizer that was not made for it: a conversation begins with the tokenizer's bos if it has one, as base models are
# trained, and a turn ends with its eos, so that every program stops there. The result is ChatML if <|im_end|> is the
# eos. <|im_start|> need not be a single token.
_CHATML = (
    "{{ bos_token | default('', true) }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT_TEMPLATES = {"chatml": _CHATML}


def read_chat_template(word: str) -> str:
    """Returns the text of a template: `word` is a name in CHAT_TEMPLATES, a file, or the text itself. Raises
    ConfigError.
    """
    if word in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[word]
    if "{{" in word or "{%" in word:  # checkpoints store the text itself
        return word
    try:
        return Path(word).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {word} cannot be read ({error}); give {', '.join(CHAT_TEMPLATES)} or a file with a Jinja "
            "template in UTF-8"
        ) from error


def argument_forms(messages: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the messages with the arguments of calls as objects, which most templates write, and as JSON text.

    A template gets the first form that it takes. OpenAI's format has text.
    """
    return [[_with_arguments(message, form) for message in messages] for form in (_as_object, _as_json)]


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its calls in another form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: changed(v) if k == "function" else form(v) if k == "arguments" else v for k, v in part.items()}

    return {**message, "tool_calls": [changed(call) for call in calls]}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
