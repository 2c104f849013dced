"""Environments: a function of the user reads a conversation behind an answer, and returns the messages that the next
answer follows, such as the result of a tool. No torch: the processes that call it import this, too."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.jsonl import check_surrogates
from megatron.core.datasets.sft_records import parse_turns
from megatron.rl.user_functions import (
    ASSISTANT,
    AnsweredPrompt,
    UserCall,
    arguments,
    file_and_function,
    import_function,
)

FLAG, DEFAULT_FUNCTION = "--custom-environment-path", "next_turn"


@dataclass(frozen=True)
class EnvironmentSource:
    """The function of the Python file `path` that continues conversations."""

    path: str
    function: str = DEFAULT_FUNCTION

    def __str__(self) -> str:
        """Returns the flag that names the function, with its value."""
        return f"{FLAG} {self.path}:{self.function}"


def environment_source(text: str) -> EnvironmentSource:
    """Returns the function that `file.py` or `file.py:function` names. Raises ConfigError for a file that does not
    exist.
    """
    return EnvironmentSource(*file_and_function(FLAG, text, DEFAULT_FUNCTION))


class EnvironmentFunction:
    """Continues one conversation."""

    def __init__(self, source: EnvironmentSource) -> None:
        """Imports the file. Raises FunctionError in one line if that fails."""
        function = import_function(source.path, source.function, str(source))
        parameters = inspect.signature(function).parameters
        self._call = UserCall(lambda answer: function(**arguments(answer.values(), parameters)), source.path)

    def __call__(self, answer: AnsweredPrompt) -> str | list[dict[str, Any]] | None:
        """Returns the messages of the next turn, or its text if the prompt is a text; None ends the conversation.

        Raises ValueError with the reason if the function fails or returns something else.
        """
        value = self._call(answer)
        if value is None:
            return None
        if isinstance(value, str) and not value:
            raise ValueError("it returned an empty text; return None to end the conversation")
        if answer.messages is None:
            if not isinstance(value, str):
                raise ValueError(
                    f"it returned a {type(value).__name__} for a prompt that is a text; return a text, or write "
                    "prompts as messages"
                )
            check_surrogates([value], "the text that it returned")
            return value
        return _messages(value)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Returns a text as a turn of the user, and a message or a list of them. Raises ValueError for other values."""
    turns: Sequence[Any] = [value] if isinstance(value, dict) else value
    if isinstance(value, str):
        turns = [{"role": "user", "content": value}]
    messages = parse_turns(turns, "the turns that it returned")
    if any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("it returned a turn of the assistant, which the model writes; return turns of other roles")
    check_surrogates([message["content"] for message in messages], "the turns that it returned")
    return messages
