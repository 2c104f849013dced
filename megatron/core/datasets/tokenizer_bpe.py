"""Tokenizers of the `tokenizers` library: a Hugging Face folder, and GPT-2's pair of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron.base.errors import DataError, first_line


class HuggingFaceTokenizer:
    """A tokenizer folder as Hugging Face saves it. The end of a document is its eos token.

    `library` is transformers' own tokenizer, for features such as chat templates. `given_template` is the text of a
    template that replaces the folder's own, in the library, too. With `special_tokens`, encoding adds the tokens of the
    folder's post-processor, such as bos, to every text, including an empty one.
    """

    def __init__(
        self,
        folder: str,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        *,
        special_tokens: bool = False,
    ) -> None:
        if not os.path.isdir(folder):
            raise DataError(
                f"--tokenizer-model {folder} is not a folder; give one that holds tokenizer.json and "
                "tokenizer_config.json, such as the folder of the model's weights"
            )
        # Imported here because the import takes seconds per process and only this tokenizer needs it.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            self.library: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # the folder's own code or a parser in Rust may raise anything
            raise DataError(
                f"--tokenizer-model {folder} cannot be loaded as a tokenizer: {first_line(error)}"
            ) from error
        if self.library.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {folder} has no eos token to end documents with; "
                "set eos_token in its tokenizer_config.json"
            )
        # Ids need not be consecutive, so the largest one counts, too.
        self.vocab_size = max(len(self.library), 1 + max(self.library.get_vocab().values()))
        self.eod = int(self.library.eos_token_id)
        self.bos: int | None = self.library.bos_token_id
        added: dict[int, Any] = self.library.added_tokens_decoder
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.given_template, self.special_tokens = chat_template, special_tokens
        if chat_template is not None:
            self.library.chat_template = chat_template
        # The underlying library, without the offsets and checks that the wrapper adds to each text.
        self._backend: Backend | None = self.library.backend_tokenizer if self.library.is_fast else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if self._backend is None:
            return [self.library.encode(text, add_special_tokens=self.special_tokens) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=self.special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out."""
        return str(self.library.decode(list(ids), clean_up_tokenization_spaces=False))


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from its vocab.json and merges.txt. <|endoftext|> ends and begins documents."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not os.path.isfile(path):
                raise DataError(f"{flag} {path} does not exist")
        try:
            self._backend = Backend(models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(
                f"{vocab_file} and {merge_file} are not GPT-2's vocab.json and merges.txt: {error}"
            ) from error
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        eod = self._backend.token_to_id("<|endoftext|>")
        if eod is None:
            raise DataError(f"--vocab-file {vocab_file} has no token <|endoftext|>, which ends documents; add it")
        self._backend.add_special_tokens(["<|endoftext|>"])
        self.vocab_size = self._backend.get_vocab_size()
        self.eod = int(eod)
        self.bos: int | None = self.eod
        self.special_ids = frozenset({self.eod})

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))
