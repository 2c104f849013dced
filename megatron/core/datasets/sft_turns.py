"""Where each turn of the assistant stands in the text of a conversation.

A template may write an earlier turn otherwise than the last one: Qwen3's leaves out the reasoning of all answers but
the last, Phi-3's ends a whole conversation with one more token, Mistral's moves the system's text to the last question.
So the text of a shorter conversation need not be how the whole text begins, and only the surroundings of a turn are
compared:

- a label is put at the end of the text of each message. The rendering with labels, without them, must be the whole
  text; then the labels show where each message ends in it (`_Places`).
- a turn begins where the same words follow the message before it as in the prompt that would request the turn,
  render(messages[:i], add_generation_prompt=True).
- it ends with the words after it that render(messages[:i + 1]) has, too. Of these the last special token is the end of
  the turn, as a rule; white space after it is the template's. For the last turn, the same conversation with one more
  question takes the place of the whole text.

A turn for which one of these comparisons fails is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Turn = Mapping[str, Any]
Render = Callable[..., str]  # (messages, add_generation_prompt=False) -> text; raises ValueError
QUESTION: Turn = {"role": "user", "content": "x"}


class TurnFinder:
    """Finds turns in the texts of one template."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        """`special_tokens` are the tokenizer's special tokens, as text."""
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._ends_with_next = False  # in the conversation at hand: see _has_no_end

    def find(self, messages: Sequence[Turn], text: str, render: Render) -> list[tuple[int, int]]:
        """Returns (start, end) in `text`, the rendering of all messages, of each turn of the assistant with its end.

        Renders the conversation, or its first part, twice for each turn. Raises ValueError for a turn that cannot be
        identified.
        """
        labels = _Labels.that_change_nothing(messages, text, render)
        self._ends_with_next = self._has_no_end(render)
        whole = labels.places(messages, render)
        turns: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._start(number, messages, whole, labels, render)
            end = None if start is None else self._end(number, start, messages, whole, labels, render)
            if start is None or end is None or not (turns[-1][1] if turns else 0) <= start <= end:
                raise ValueError(
                    f"is rendered by the chat template so that turn {number + 1} "
                    f"{'begins' if start is None else 'ends'} otherwise in the whole text than in the text up to "
                    "this turn: the assistant's text cannot be identified; split the conversation, or give a template "
                    "with {% generation %} marks with --chat-template"
                )
            turns.append((start, end))
        return turns

    def _has_no_end(self, render: Render) -> bool:
        """Whether nothing follows the text of a turn at the end of a conversation."""
        try:
            return render([QUESTION, {"role": "assistant", "content": "word"}]).endswith("word")
        except ValueError:
            return False

    def _start(
        self, number: int, messages: Sequence[Turn], whole: _Places, labels: _Labels, render: Render
    ) -> int | None:
        prompt = labels.places(messages[:number], render, add_generation_prompt=True)
        before = max(prompt.ends, default=-1)
        header, place = prompt.text[prompt.ends.get(before, 0) :], whole.ends.get(before, 0)
        if whole.text.startswith(header, place):
            return place + len(header)
        # The prompt may open a part, such as reasoning, that this turn does not have or writes otherwise.
        shared = self._up_to_special(_common(header, whole.text[place:]))
        if not header[len(shared) :].strip():
            shared = shared[: max((match.start() for match in self._special.finditer(shared)), default=0)]
        return place + len(shared) if shared and self._special.match(header, len(shared)) else None

    def _end(
        self, number: int, start: int, messages: Sequence[Turn], whole: _Places, labels: _Labels, render: Render
    ) -> int | None:
        place = whole.ends.get(number, start)
        if number + 1 < len(messages):
            if number not in whole.ends:  # a turn without text: all of it is its end
                return self._end_of_nothing(number, start, messages, whole, labels, render)
            shorter = labels.places(messages[: number + 1], render)
            shared = self._shared_end(shorter.text[shorter.ends[number] :], whole.text[place:])
            return None if shared is None else place + len(shared)
        tail = whole.text[place:]
        try:
            longer = labels.places([*messages, QUESTION], render)
        except ValueError:  # no question may follow here, as after a call
            longer = None
        inside = longer.text[longer.ends[number] :] if longer is not None and number in longer.ends else ""
        ended = self._up_to_special(_common(tail, inside))
        if not ended:
            said = tail.rstrip()
            ended = said if said and self._up_to_special(tail) == said else tail
        return place + len(ended)

    def _end_of_nothing(
        self, number: int, start: int, messages: Sequence[Turn], whole: _Places, labels: _Labels, render: Render
    ) -> int | None:
        """The end of a turn without text or calls: the words after its start that a conversation ending with it has,
        too."""
        shorter = labels.places(messages[: number + 1], render).text
        prompt = labels.places(messages[:number], render, add_generation_prompt=True).text
        if not shorter.startswith(prompt):
            return None
        shared = self._shared_end(shorter[len(prompt) :], whole.text[start:])
        return None if shared is None else start + len(shared)

    def _shared_end(self, tail: str, inside: str) -> str | None:
        """The end of a turn, from the texts that follow it at the end of a conversation and inside of one.

        It is the text up to the last special token in both, or all of `tail` if that has none. Two kinds of templates
        differ: gpt-oss has another token for the end of a conversation, and GLM's models end by naming who speaks next.
        """
        shared = _common(tail, inside)
        following = self._special.match(inside, len(tail) if shared == tail and self._ends_with_next else 0)
        last = self._special.match(tail)
        ended = self._up_to_special(shared) or (shared if shared == tail else None)
        if following and self._ends_with_next and shared == tail:
            return tail + following[0]
        if following and ended is None and last and last[0] == tail.rstrip():
            return following[0]
        return ended

    def _up_to_special(self, text: str) -> str:
        """The text up to the end of its last special token; empty if it has none."""
        ends = [match.end() for match in self._special.finditer(text)]
        return text[: ends[-1]] if ends else ""


@dataclass(frozen=True)
class _Places:
    """A rendering, and the place in it where each labelled message ends, by the number of the message."""

    text: str
    ends: dict[int, int]


class _Labels:
    """Words that are put at the end of messages, so that a rendering shows where each of them stands."""

    def __init__(self, word: str, numbers: Collection[int]) -> None:
        """`word` occurs nowhere else in the texts. `numbers` are the numbers of the messages that get a label."""
        self._word, self._numbers = word, numbers
        self._pattern = re.compile(f"{word}([0-9]+)z")

    @classmethod
    def that_change_nothing(cls, messages: Sequence[Turn], text: str, render: Render) -> _Labels:
        """Labels for the messages whose label leaves the rest of the rendering, `text`, as it is."""
        word = "q" + os.urandom(8).hex()
        labels = cls(word, range(len(messages)))
        if labels._fit(messages, text, render):
            return labels
        return cls(word, [n for n in range(len(messages)) if cls(word, [n])._fit(messages, text, render)])

    def _fit(self, messages: Sequence[Turn], text: str, render: Render) -> bool:
        try:
            return self.places(messages, render).text == text
        except ValueError:  # the template takes no other text here
            return False

    def places(self, messages: Sequence[Turn], render: Render, **options: bool) -> _Places:
        """Renders the messages with labels, and returns the text without them. Raises ValueError."""
        labelled = [
            self._labelled(number, message) if number in self._numbers else message
            for number, message in enumerate(messages)
        ]
        ends: dict[int, int] = {}
        text, length = "", 0
        rendered = render(labelled, **options)
        for match in self._pattern.finditer(rendered):
            text += rendered[length : match.start()]
            length = match.end()
            ends.setdefault(int(match[1]), len(text))  # the name of a call may occur again with its result
        return _Places(text + rendered[length:], ends)

    def _labelled(self, number: int, message: Turn) -> Turn:
        label, content = f"{self._word}{number}z", message["content"]
        if calls := message.get("tool_calls"):
            call = _call(calls[-1])
            if call is not None:
                function, name = call
                labelled = {**function, "name": name + label}
                last = {**calls[-1], "function": labelled} if function is not calls[-1] else labelled
                return {**message, "tool_calls": [*calls[:-1], last]}
        said = content.rstrip()
        return {**message, "content": said + label + content[len(said) :]} if said else message


def _call(call: Any) -> tuple[dict[str, Any], str] | None:
    """(the part of a call that has its name, the name), if it has one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return (function, name) if isinstance(function, dict) and isinstance(name, str) else None


def _common(text: str, other: str) -> str:
    """The words with which both begin."""
    pairs = enumerate(zip(text, other))
    return text[: next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))]
