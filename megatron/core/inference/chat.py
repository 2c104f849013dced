"""Renders chat messages to the text of a prompt, by the chat template of a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.base.errors import DataError, first_line
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer


class ChatTemplate:
    """Renders as `transformers` does, in Jinja's sandbox: a model's template cannot access anything else."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._library = tokenizer.library

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text that ends where the assistant's next answer begins. Raises DataError."""
        try:
            text = self._library.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template may raise anything on these messages
            raise DataError(f"the chat template does not take these messages: {first_line(error)}") from error
        return str(text)


def open_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the tokenizer's template, or None if it has none. Raises DataError."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.library.chat_template:
        return None
    template = ChatTemplate(tokenizer)
    if tokenizer.given_template is not None:
        template.render([{"role": "user", "content": "Hello"}])  # reports a template that cannot be parsed at start-up
    return template
