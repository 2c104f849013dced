"""Text <-> token ids: the interface, the choice by flag, and the tokenizer that needs no files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import GPT2, HUGGING_FACE, NULL, SENTENCEPIECE, TIKTOKEN, TokenizerConfig
from megatron.core.datasets.chat_templates import read_chat_template
from megatron.core.datasets.tokenizer_bpe import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.datasets.tokenizer_sentencepiece import SentencePieceTokenizer
from megatron.core.datasets.tokenizer_tiktoken import TikTokenizer


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Every id is below `vocab_size`, including added tokens. `eod` ends a document. `bos` is None if there is none.
    `special_ids` are those of tokens that stand for no text, such as the ends of turns. No
    method adds special tokens unless `build_tokenizer` was asked for them; text that spells one is encoded to it if the
    library does so. Batches are encoded sequentially unless the library has its own threads.
    """

    vocab_size: int
    eod: int
    bos: int | None
    special_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out where the library can."""
        ...


class NullTokenizer:
    """Encodes text that consists of token ids, separated by spaces. `eod` defaults to the vocabulary's last id.

    Raises ConfigError for an `eod` that is not an id.
    """

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        self.vocab_size, self.eod = vocab_size, vocab_size - 1 if eod is None else eod
        if not 0 <= self.eod < vocab_size:
            raise ConfigError(f"--null-tokenizer-eod-id {eod} is not below the vocabulary of {vocab_size}; lower it")
        self.bos: int | None = None
        self.special_ids = frozenset({self.eod})

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises DataError for a word that is not an id of the vocabulary."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads token ids separated by spaces: {error}") from error
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise DataError(f"token id {bad} is outside the vocabulary of {self.vocab_size}; raise --vocab-size")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(str(i) for i in ids)


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None, *, special_tokens: bool = False) -> Tokenizer:
    """Builds the tokenizer that the flags ask for. `special_tokens`: a Hugging Face tokenizer adds its own to every
    text.

    `vocab_size` is --vocab-size: required by NullTokenizer, a limit for TikTokenizer, and ignored by the others, whose
    files contain it. Raises ConfigError for a missing flag and DataError for a missing or damaged file.
    """
    kind = config.tokenizer_type
    if kind is None:
        raise ConfigError("no tokenizer is given; add --tokenizer-type")
    if config.chat_template is not None and kind not in HUGGING_FACE:
        raise ConfigError(
            f"--chat-template is rendered by --tokenizer-type HuggingFaceTokenizer, and it is {kind}; remove it"
        )
    if kind == NULL:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"--tokenizer-type NullTokenizer needs --vocab-size, at least 1, and got {vocab_size}")
        return NullTokenizer(vocab_size, config.null_tokenizer_eod_id)
    if kind == GPT2:
        vocab_file = _given(config.vocab_file, kind, "--vocab-file")
        return GPT2BPETokenizer(vocab_file, _given(config.merge_file, kind, "--merge-file"))
    model = _given(config.tokenizer_model, kind, "--tokenizer-model")
    if kind in HUGGING_FACE:
        template = None if config.chat_template is None else read_chat_template(config.chat_template)
        return HuggingFaceTokenizer(model, config.trust_remote_code, template, special_tokens=special_tokens)
    if kind in SENTENCEPIECE:
        return SentencePieceTokenizer(model)
    if kind == TIKTOKEN:
        return TikTokenizer(
            model, config.tiktoken_pattern or "v2", config.tiktoken_num_special_tokens, vocab_size=vocab_size
        )
    raise ConfigError(f"--tokenizer-type {kind} is not known; --help lists the kinds")


def beginning(tokenizer: Tokenizer, add_bos: bool) -> list[int]:
    """Returns the tokens before the text of a prompt: with --add-bos the tokenizer's bos. Raises ConfigError for a
    tokenizer without one.
    """
    if not add_bos:
        return []
    if tokenizer.bos is None:
        raise ConfigError("--add-bos is given but the tokenizer has no bos token; remove it")
    return [tokenizer.bos]


def portable(config: TokenizerConfig) -> TokenizerConfig:
    """Returns the configuration of the same tokenizer, independent of the working directory, for storing.

    Paths become absolute and the chat template becomes its text. Raises ConfigError for a chat template that cannot be
    read.
    """
    paths = {name: getattr(config, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    absolute = {name: os.path.abspath(path) for name, path in paths.items() if path is not None}
    template = config.chat_template
    return dataclasses.replace(
        config, chat_template=None if template is None else read_chat_template(template), **absolute
    )


def _given(value: str | None, kind: str, flag: str) -> str:
    if value is None:
        raise ConfigError(f"--tokenizer-type {kind} needs {flag}")
    return value
