"""Conversation -> tokens, and which of them the assistant wrote.

A template with `{% generation %}` marks says so itself. For any other one the text of the conversation is cut: a turn of
the assistant is what the text up to it has more than the prompt that would ask for it,

    render(messages[:i + 1])  -  render(messages[:i], add_generation_prompt=True)

That holds only while each of these texts begins with the one before. It is checked for every conversation, and one for
which it fails is refused: some templates drop or move text of earlier turns, and no cut of the final text is right then.
The end-of-turn token belongs to the turn; white space that the template puts after it does not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.errors import ConfigError

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's template, or `template`, a template's text, in its place."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None = None) -> None:
        if template is None and not tokenizer.library.chat_template:
            raise ConfigError("the tokenizer has no chat template; give a file that holds one with --chat-template")
        self._tokenizer, self._template = tokenizer, template
        # A turn ends where a token of its own ends it, and where there is none with its text.
        self._marks = tuple(tokenizer.library.get_added_vocab())

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is trained on). Raises ValueError for a conversation the template does not suit."""
        try:
            template = self._tokenizer.library.get_chat_template(self._template, conversation.tools)
        except ValueError as error:
            raise ValueError(f"fits none of the tokenizer's templates: {_first_line(error)}") from error
        if MARK.search(template):
            tokens, trained = self._encode_marked(conversation)
        else:
            tokens, trained = self._encode_by_prefixes(conversation)
        # What comes first is not predicted.
        if not any(trained[1:]):
            raise ValueError("has no token to train on: the chat template writes nothing for the assistant's turns")
        return tokens, trained

    def _encode_marked(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        found = self._apply(
            conversation, conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]

    def _encode_by_prefixes(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        messages = conversation.messages
        if messages[0]["role"] == "assistant":
            raise ValueError("begins with a turn of the assistant, which answers no prompt; remove that turn")
        text = self._apply(conversation, messages)
        bounds = [0]  # prompt and turn in turn: even pieces are prompts
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._apply(conversation, messages[:number], add_generation_prompt=True)
            turn = self._apply(conversation, messages[: number + 1]) if number + 1 < len(messages) else text
            if not (turn.startswith(prompt) and text.startswith(turn) and bounds[-1] <= len(prompt)):
                raise ValueError(
                    f"is rendered by the chat template so that the text up to turn {number + 1} is not how the whole "
                    "text begins (it changes earlier turns): what the assistant wrote cannot be told; split the "
                    "conversation, or give a template with {% generation %} marks with --chat-template"
                )
            bounds += [len(prompt), max(len(prompt), self._end(turn))]
        pieces = self._tokenize(text, [*bounds, len(text)])
        tokens = list(itertools.chain.from_iterable(pieces))
        return tokens, [number % 2 == 1 for number, piece in enumerate(pieces) for _ in piece]

    def _end(self, turn: str) -> int:
        bare = turn.rstrip()
        return len(bare) if bare.endswith(self._marks) else len(turn)

    def _tokenize(self, text: str, bounds: Sequence[int]) -> list[list[int]]:
        """Tokens of each piece of `text` between `bounds`, such that together they are the text's."""
        whole, *pieces = self._tokenizer.encode_batch([text, *(text[a:b] for a, b in itertools.pairwise(bounds))])
        joined = list(itertools.chain.from_iterable(pieces))
        if joined == whole:
            return pieces
        # Some tokenizers put a space before what they are given: they cut texts that begin where this one does.
        begun = self._tokenizer.encode_batch([text[:bound] for bound in bounds[1:]])
        if all(tokens == whole[: len(tokens)] for tokens in begun):
            return [whole[a:b] for a, b in itertools.pairwise([0, *map(len, begun)])]
        # One token would lie across a bound. In generation it cannot: the prompt is tokenized without what follows.
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
        except Exception as error:  # whatever the template's own code raises
            raise ValueError(f"is refused by the chat template: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
