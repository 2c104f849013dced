"""Chat: messages -> the text of a prompt, by the chat template of a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.errors import ConfigError, DataError


class ChatTemplate:
    """Renders as `transformers` does, in Jinja's sandbox: a template that came with a model can reach nothing."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, source: str | None) -> None:
        """`source`: a template's text in the place of the tokenizer's own."""
        self._library, self._source = tokenizer.library, source

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that ends where the assistant's next answer begins. Raises DataError."""
        try:
            text = self._library.apply_chat_template(
                list(messages), chat_template=self._source, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template raises on these messages
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise DataError(f"the chat template does not take these messages: {reason}") from error
        return str(text)


def open_template(tokenizer: Tokenizer, file: str | None) -> ChatTemplate | None:
    """The template of `file`, or else the tokenizer's own, None where it has none. Raises ConfigError and DataError."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if file is not None:
            raise ConfigError(f"--chat-template {file} needs --tokenizer-type HuggingFaceTokenizer, which renders it")
        return None
    if file is None:
        return ChatTemplate(tokenizer, None) if tokenizer.library.chat_template else None
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat-template {file} cannot be read: {error}; give a UTF-8 text file") from error
    template = ChatTemplate(tokenizer, source)
    template.render([{"role": "user", "content": "Hello"}])  # a template that cannot be parsed is found at once
    return template
