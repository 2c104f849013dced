"""Calls of tools in the text of an answer, complete or as it grows.

Two forms are read, those of most open models: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of
times in a text (Hermes, Qwen), and an answer that is nothing but such an object, or a list of them, with "arguments" or
"parameters" (Llama 3, Mistral). Only calls of a tool that the request offers count; anything else stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallReader:
    """Divides an answer into text and calls. Text that may become a call is held back until that is known."""

    def __init__(self, tools: Collection[str]) -> None:
        """tools: names of the functions that may be called."""
        self._tools = tools
        self._held = ""
        self._text_began = False
        self.calls: list[dict[str, Any]] = []  # all so far, in OpenAI's form

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Adds text of the answer. Returns text that is no call, and the calls that are complete with it."""
        self._held += text
        if not self._text_began and self._held.lstrip()[:1] in ("", "{", "["):
            return "", []  # the whole answer may be a call
        return self._divide()

    def close(self, is_complete: bool = True) -> tuple[str, list[dict[str, Any]]]:
        """Ends the answer. Returns what has been held back. The last call of an answer that was not cut off may lack
        its mark, which some models leave out and a stop string may be.
        """
        calls = [] if self._text_began else self._calls_in(self._held)
        if calls:
            self._held = ""
            return "", calls
        text, calls = self._divide()
        remainder, self._held = self._held, ""
        before, mark, inner = remainder.partition(OPEN)
        if mark and is_complete and (last := self._calls_in(inner)):
            return text + before.rstrip(), [*calls, *last]
        return text + (remainder if remainder.strip() or not self.calls else ""), calls

    def _divide(self) -> tuple[str, list[dict[str, Any]]]:
        said, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._end(start + len(OPEN))
            if end < 0:
                break
            inner_calls = self._calls_in(self._held[start + len(OPEN) : end])
            end += len(CLOSE)
            before = self._held[:start]
            # White space before a call is the form's.
            said += before if not inner_calls else before.rstrip() if before.strip() else ""
            said += "" if inner_calls else self._held[start:end]
            calls += inner_calls
            self._held = self._held[end:]
        safe = len(self._held[:start].rstrip()) if start >= 0 else len(self._held) - self._beginning()
        said, self._held = said + self._held[:safe], self._held[safe:]
        self._text_began = self._text_began or bool(said.strip()) or bool(calls)
        return said, calls

    def _end(self, start: int) -> int:
        """Returns the place of the mark that ends the JSON from `start` on, or -1. A mark in a string of it is no
        end."""
        end = self._held.find(CLOSE, start)
        while end >= 0:
            try:
                json.loads(self._held[start:end])
                return end
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated string"):
                    return end
            except (ValueError, RecursionError):
                return end
            end = self._held.find(CLOSE, end + 1)
        return -1

    def _beginning(self) -> int:
        """Characters at the end of the held text that may begin a call, with the white space before them."""
        lengths = range(min(len(OPEN), len(self._held)), 0, -1)
        begun = next((n for n in lengths if OPEN.startswith(self._held[-n:])), 0)
        before = self._held[: len(self._held) - begun]
        return begun + len(before) - len(before.rstrip())

    def _calls_in(self, text: str) -> list[dict[str, Any]]:
        """The calls that a JSON text is, if it is nothing else. Adds them to `calls`."""
        try:
            value = json.loads(text)
            objects = value if isinstance(value, list) else [value]
            pairs = [self._call(item) for item in objects]
        except (ValueError, RecursionError):
            return []
        whole = [pair for pair in pairs if pair is not None]
        if not whole or len(whole) < len(pairs):
            return []
        new_calls = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in whole
        ]
        self.calls += new_calls
        return new_calls

    def _call(self, call: Any) -> tuple[str, str] | None:
        """(name, arguments as JSON) of a call. Raises ValueError for NaN, infinity and half of a surrogate pair."""
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._tools:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
        return name, text
