"""SentencePiece models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor

from megatron.base.errors import DataError


class SentencePieceTokenizer:
    """A SentencePiece `.model` file. The end of a document is its eos piece."""

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise DataError(f"--tokenizer-model {path} does not exist; give a SentencePiece .model file")
        try:
            self._model: Any = SentencePieceProcessor(model_file=path)
        except RuntimeError as error:
            raise DataError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error
        if self._model.eos_id() < 0:
            raise DataError(f"the SentencePiece model {path} has no eos piece to end documents with; train it with one")
        self.vocab_size = int(self._model.vocab_size())
        self.eod = int(self._model.eos_id())
        bos = int(self._model.bos_id())
        self.bos: int | None = bos if bos >= 0 else None
        self.special_ids = frozenset(number for number in range(self.vocab_size) if self._model.is_control(number))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._model.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return list(self._model.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control pieces such as eos have none."""
        return str(self._model.decode([int(i) for i in ids]))
