"""Byte-level BPE through tiktoken, from Megatron's vocabulary file."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken

from megatron.base.errors import ConfigError, DataError
from megatron.base.read_file import read_json

# The pattern that splits text before merging is part of the vocabulary's format: a model trained with one cannot use
# another.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
DEFAULT_VOCAB_SIZE = 1 << 17


class TikTokenizer:
    """Reads a JSON list of {"rank": i, "token_bytes": base64, "token_str": text}, the 256 single bytes first.

    Ids [0, num_special_tokens) are special: <unk>, <s>, </s>, <mask>, <pad>, <cls>, <sep>, then <SPECIAL_7> and so on.
    The file's tokens follow, as many as fit in `vocab_size` (default 131072, or fewer if the file has fewer). </s> ends
    documents.
    """

    def __init__(
        self, path: str, pattern: str = "v2", num_special_tokens: int = 1000, vocab_size: int | None = None
    ) -> None:
        if num_special_tokens < len(SPECIAL_TOKENS):
            raise ConfigError(
                f"--tiktoken-num-special-tokens {num_special_tokens} leaves no room for {', '.join(SPECIAL_TOKENS)}; "
                f"give at least {len(SPECIAL_TOKENS)}"
            )
        tokens = _read_tokens(path)
        available = num_special_tokens + len(tokens)
        self.vocab_size = min(DEFAULT_VOCAB_SIZE, available) if vocab_size is None else vocab_size
        if not num_special_tokens + 256 <= self.vocab_size <= available:
            raise ConfigError(
                f"--vocab-size {self.vocab_size} does not fit {path}: its {len(tokens)} tokens and "
                f"{num_special_tokens} special ones allow {num_special_tokens + 256} to {available}"
            )
        special = [*SPECIAL_TOKENS, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL_TOKENS), num_special_tokens))]
        ordinary = tokens[: self.vocab_size - num_special_tokens]
        self._encoding = tiktoken.Encoding(
            name=path,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: rank for rank, token in enumerate(ordinary, start=num_special_tokens)},
            special_tokens={text: number for number, text in enumerate(special)},
        )
        self.bos: int | None = special.index("<s>")
        self.eod = special.index("</s>")
        self.special_ids = frozenset(range(num_special_tokens))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return self._encoding.encode(text, allowed_special="all")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that do not form a complete character become U+FFFD."""
        return self._encoding.decode(list(ids))


def _read_tokens(path: str) -> list[bytes]:
    """Returns the tokens of a vocabulary file by rank. Raises DataError if the file is missing or of another format."""
    try:
        entries: list[dict[str, Any]] = read_json(Path(path))
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks = [entry["rank"] for entry in entries]
    except OSError as error:
        raise DataError(f"--tokenizer-model {path} cannot be read: {error}; give a tiktoken vocabulary file") from error
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise DataError(
            f"--tokenizer-model {path} is not a list of rank, token_bytes and token_str in JSON: {error!r}"
        ) from error
    if ranks != list(range(len(tokens))) or len(set(tokens)) != len(tokens):
        raise DataError(f"--tokenizer-model {path} must list each token once, with ranks 0, 1, 2 and so on")
    if tokens[:256] != [bytes([i]) for i in range(256)]:
        raise DataError(f"--tokenizer-model {path} must begin with the 256 single bytes in order")
    return tokens
