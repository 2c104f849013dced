"""Conversation -> tokens, and a mark for each token that the assistant wrote.

A template with `{% generation %}` marks provides this itself. For any other template `sft_turns.py` finds the turns in
the text of the whole conversation. The end-of-turn token belongs to the turn; white space that the template puts after
it does not.

[Note: ignored parts of a conversation]
A template only writes the parts that its author knew. Other parts, such as `tool_calls` or `tools`, are dropped
silently, and a turn that held nothing else becomes an empty answer to learn. So a conversation is rejected if its
rendering does not depend on one of these parts: the text of a turn, the tools, a field of the turns that holds an
object or a list, or text to learn (TEXTS). Other fields, such as names and ids, are only labels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron.base.errors import ConfigError, first_line
from megatron.core.datasets.chat_templates import argument_forms
from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.sft_turns import TurnFinder
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer

TEXTS = ("reasoning_content", "reasoning", "thinking", "refusal")
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SFTTemplate:
    """Encodes by a tokenizer's chat template, or by the text `template` instead. Raises ConfigError if there is
    none."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None = None) -> None:
        if template is None and not tokenizer.library.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, like most base models; give --chat-template chatml, or a file "
                "that holds one"
            )
        self._tokenizer, self._template = tokenizer, template
        self._special = tuple(tokenizer.library.get_added_vocab())
        self._turns = TurnFinder(self._special)

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is trained on). Raises ValueError for a conversation that the template does not
        suit.
        """
        try:
            template = self._tokenizer.library.get_chat_template(self._template, conversation.tools)
        except ValueError as error:
            raise ValueError(f"fits none of the tokenizer's templates: {first_line(error)}") from error
        conversation = self._with_arguments_it_takes(conversation)
        marked = MARK.search(template) is not None
        if not marked and conversation.messages[0]["role"] == "assistant":
            raise ValueError("begins with a turn of the assistant, which answers no prompt; remove that turn")
        text = self._apply(conversation, conversation.messages)
        self._check_nothing_is_left_out(conversation, text)
        if marked:
            tokens, trained = self._encode_marked(conversation)
        else:
            tokens, trained = self._encode_by_turns(conversation, text)
        # The first token is not predicted.
        if not any(trained[1:]):
            raise ValueError("has no token to train on: the chat template writes nothing for the assistant's turns")
        return tokens, trained

    def _with_arguments_it_takes(self, conversation: Conversation) -> Conversation:
        """Returns the conversation with the arguments of calls as objects, or as JSON text where the template needs
        that.

        OpenAI's format has text, and most templates write objects.
        """
        if not any(message.get("tool_calls") for message in conversation.messages):
            return conversation
        forms = [dataclasses.replace(conversation, messages=turns) for turns in argument_forms(conversation.messages)]
        for form in forms:
            with suppress(ValueError):
                self._apply(form, form.messages)
                return form
        return forms[0]

    def _encode_marked(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        encoding = self._apply(
            conversation, conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [bool(mark) for mark in encoding["assistant_masks"]]
        if conversation.untrained:
            trained = _without(trained, conversation)
        return list(encoding["input_ids"]), trained

    def _encode_by_turns(self, conversation: Conversation, text: str) -> tuple[list[int], list[bool]]:
        messages = conversation.messages
        turns = self._turns.find(messages, text, functools.partial(self._apply, conversation))
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number, (start, end) in zip(answers, turns, strict=True):
            if _holds_more(messages[number]) and not self._is_written(text[start:end]):
                raise ValueError(f"has turn {number + 1} from assistant, for which the chat template writes nothing")
        # Bounds of prompts and turns alternately: even pieces are prompts.
        pieces = self._tokenize(text, [0, *itertools.chain.from_iterable(turns), len(text)])
        tokens = list(itertools.chain.from_iterable(pieces))
        learnt = [n % 2 == 1 and answers[n // 2] not in conversation.untrained for n in range(len(pieces))]
        return tokens, [is_learnt for is_learnt, piece in zip(learnt, pieces, strict=True) for _ in piece]

    def _check_nothing_is_left_out(self, conversation: Conversation, text: str) -> None:
        """Raises ValueError for a part on which `text`, the conversation's rendering, does not depend.

        [Note: ignored parts of a conversation]
        """
        messages = conversation.messages
        for number, message in enumerate(messages):
            said = message["content"].strip()
            if said and said not in text:
                other = [*messages[:number], {**message, "content": message["content"] + "x"}, *messages[number + 1 :]]
                if self._renders_as(dataclasses.replace(conversation, messages=other), text):
                    raise ValueError(
                        f"has turn {number + 1} from {message['role']}, whose text the chat template leaves out"
                    )
        for name in dict.fromkeys(
            name for message in messages for name in message if _is_to_learn(name, message[name])
        ):
            without = [{key: value for key, value in message.items() if key != name} for message in messages]
            if self._renders_as(dataclasses.replace(conversation, messages=without), text):
                number = next(n for n, message in enumerate(messages, start=1) if message.get(name))
                raise ValueError(
                    f"has '{name}' in turn {number}, which the chat template leaves out; remove it, or give a template "
                    "that writes it with --chat-template"
                )
        if conversation.tools and self._renders_as(dataclasses.replace(conversation, tools=None), text):
            raise ValueError(
                "has 'tools', which the chat template leaves out; remove them, or give a template that writes them "
                "with --chat-template"
            )

    def _renders_as(self, conversation: Conversation, text: str) -> bool:
        try:
            return bool(self._apply(conversation, conversation.messages) == text)
        except ValueError:  # the template needs the removed part
            return False

    def _is_written(self, turn: str) -> bool:
        """Returns whether a turn's text has more than the tokens that end it."""
        for token in self._special:
            turn = turn.replace(token, "")
        return bool(turn.strip())

    def _tokenize(self, text: str, bounds: Sequence[int]) -> list[list[int]]:
        """Returns the tokens of each piece of `text` between `bounds`, such that they concatenate to the tokens of the
        text.
        """
        whole, *pieces = self._tokenizer.encode_batch([text, *(text[a:b] for a, b in itertools.pairwise(bounds))])
        joined = list(itertools.chain.from_iterable(pieces))
        if joined == whole:
            return pieces
        # Some tokenizers put a space before the text they get: tokenize prefixes, which begin as this text does.
        begun = self._tokenizer.encode_batch([text[:bound] for bound in bounds[1:]])
        if all(tokens == whole[: len(tokens)] for tokens in begun):
            return [whole[a:b] for a, b in itertools.pairwise([0, *map(len, begun)])]
        # One token would cross a bound. In generation it cannot, because the prompt is tokenized without the answer.
        if self._tokenizer.decode(joined) == self._tokenizer.decode(whole):
            return pieces
        raise ValueError(
            "has a turn of the assistant whose first token begins in the prompt, and the tokenizer cannot cut there; "
            "end the prompt with a token of its own in the template given with --chat-template"
        )

    def _apply(self, conversation: Conversation, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        library = self._tokenizer.library
        options = {"tokenize": False, "chat_template": self._template, "tools": conversation.tools, **options}
        try:
            return library.apply_chat_template(list(messages), **options)
        except Exception as error:  # the template's own code may raise anything
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error


def _is_to_learn(name: str, value: Any) -> bool:
    return name not in ("role", "content") and bool(value) and (isinstance(value, dict | list) or name in TEXTS)


def _holds_more(message: dict[str, Any]) -> bool:
    return any(_is_to_learn(name, value) for name, value in message.items())


def _without(trained: list[bool], conversation: Conversation) -> list[bool]:
    """Clears the marks of the turns that are not trained on. Raises ValueError if there is not one mark per turn."""
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    runs = [(is_trained, len(list(marks))) for is_trained, marks in itertools.groupby(trained)]
    marked = sum(is_trained for is_trained, _ in runs)
    if marked != len(answers):
        raise ValueError(
            f"has turns of weight 0, and the chat template makes {marked} marked parts for {len(answers)} turns of the "
            "assistant: the parts cannot be matched to the turns; give a template with one {% generation %} mark per "
            "turn"
        )
    places = iter(answers)
    turn_marks: list[bool] = []
    for is_trained, length in runs:
        turn_marks += [is_trained and next(places) not in conversation.untrained] * length
    return turn_marks
