"""Renders chat messages to the text of a prompt, by the chat template of a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.base.errors import DataError, first_line
from megatron.core.datasets.chat_templates import argument_forms
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer


class ChatTemplate:
    """Renders as `transformers` does, in Jinja's sandbox: a model's template cannot access anything else."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._library = tokenizer.library

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Returns the text that ends where the assistant's next answer begins.

        options: for transformers and the template, such as `tools`. Raises DataError, also if the template leaves out
        the tools, or calls of them.
        """
        text = self._render(messages, options)
        if options.get("tools") and self._is(text, messages, {**options, "tools": None}):
            raise DataError("the chat template does not write tools, so the model would not see them")
        without_calls = [{k: v for k, v in message.items() if k != "tool_calls"} for message in messages]
        if without_calls != messages and self._is(text, without_calls, options):
            raise DataError("the chat template does not write tool_calls, so the model would not see them")
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        errors: list[Exception] = []
        for form in argument_forms(messages):
            try:
                arguments = {"add_generation_prompt": True, **options}
                return str(self._library.apply_chat_template(form, tokenize=False, **arguments))
            except Exception as error:  # the template may raise anything on these messages
                errors.append(error)
        raise DataError(f"the chat template does not take these messages: {first_line(errors[0])}") from errors[0]

    def _is(self, text: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
        try:
            return self._render(messages, options) == text
        except DataError:  # the template needs the part
            return False


def open_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the tokenizer's template, or None if it has none. Raises DataError."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.library.chat_template:
        return None
    template = ChatTemplate(tokenizer)
    if tokenizer.given_template is not None:
        template.render([{"role": "user", "content": "Hello"}])  # reports a template that cannot be parsed at start-up
    return template
