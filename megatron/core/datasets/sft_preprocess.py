"""JSON lines of instruction data -> tokens and their mask, with the workers of preprocess.py."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets.indexed import pack_tokens
from megatron.core.datasets.jsonl import FileBlock, find_inputs
from megatron.core.datasets.preprocess import EncodedBlock, Output, Packed, encode_blocks, write_blocks
from megatron.core.datasets.sft import MASK_DTYPE, TOKEN_DTYPE, mask_prefix, template_path
from megatron.core.datasets.sft_records import parse_conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """The fields are the flags of tools/preprocess_sft.py. seq_length None keeps every conversation whole."""

    input: tuple[str, ...]
    output_prefix: str
    workers: int
    seq_length: int | None = None
    truncate: bool = False
    on_error: str = "stop"
    log_interval: int = 1000


@dataclass(frozen=True)
class SFTSummary:
    """The totals of a run. `dropped` counts conversations over --seq-length (with --truncate: without a token to train
    on).
    """

    conversations: int
    tokens: int
    trained: int  # tokens with a loss
    dropped: int
    truncated: int
    skipped: int  # lines skipped by --on-error skip
    bytes: int
    seconds: float


def preprocess_sft(options: SFTOptions, tokenizer: Tokenizer) -> SFTSummary:
    """Writes `{output_prefix}.bin/.idx` and `{output_prefix}_mask.bin/.idx`, all or nothing; conversation i is sequence
    i.

    `{output_prefix}.jinja` keeps the chat template if it is not the tokenizer's own. Raises DataError with the file and
    line for a conversation that cannot be used, unless --on-error skip skips it, and ConfigError for impossible
    options.
    """
    tokenizer = _check(options, tokenizer)
    paths = find_inputs(options.input)
    prefix = options.output_prefix
    try:
        with ExitStack() as stack:
            outputs = {
                "mask": stack.enter_context(Output(mask_prefix(prefix), MASK_DTYPE)),
                "tokens": stack.enter_context(Output(prefix, TOKEN_DTYPE)),
            }
            encoder = ConversationEncoder(
                SFTTemplate(tokenizer), options.seq_length, options.truncate, options.on_error
            )
            written = write_blocks(
                encode_blocks(paths, encoder, options.workers), outputs, options.log_interval, options.on_error
            )
            counts = written.counts
            if not written.documents:
                dropped = counts["dropped"]
                why = f"none of its {dropped} fits in --seq-length {options.seq_length}" if dropped else "it is empty"
                why = f"all of its {written.skipped} lines were skipped" if written.skipped and not dropped else why
                raise DataError(f"--input {' '.join(options.input)} holds no conversation to train on: {why}")
            # A reader sees the old pairs, none, or the new ones, because a dataset does not exist without its index.
            Path(f"{prefix}.idx").unlink(missing_ok=True)
            if tokenizer.given_template is None:
                template_path(prefix).unlink(missing_ok=True)
            else:
                template_path(prefix).write_text(tokenizer.given_template, encoding="utf-8")
            for output in outputs.values():
                output.finalize()
    except OSError as error:
        raise DataError(f"preprocessing into {prefix} failed: {error}") from error
    return SFTSummary(
        conversations=written.documents,
        tokens=counts["tokens"],
        trained=counts["trained"],
        dropped=counts["dropped"],
        truncated=counts["truncated"],
        skipped=written.skipped,
        bytes=written.bytes,
        seconds=written.seconds,
    )


class ConversationEncoder(Dataset[EncodedBlock]):
    """Maps a block to packed conversations. It is sent to worker processes and therefore holds everything they need."""

    def __init__(self, template: SFTTemplate, seq_length: int | None, truncate: bool, on_error: str) -> None:
        self.template, self.seq_length, self.truncate, self.on_error = template, seq_length, truncate, on_error

    def __getitem__(self, block: FileBlock) -> EncodedBlock:
        lines = block.lines()
        conversations: list[tuple[list[int], list[bool]]] = []
        counts = dict.fromkeys(("tokens", "trained", "dropped", "truncated"), 0)
        refused: list[tuple[int, str]] = []
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                tokens, trained = self.template.encode(parse_conversation(line))
            except ValueError as error:
                refused.append((number, str(error)))
                if self.on_error == "stop":
                    return EncodedBlock(block, len(lines), refused=refused)
                continue
            if self.seq_length is not None and len(tokens) > self.seq_length:
                if not (self.truncate and any(trained[1 : self.seq_length])):
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += 1
                tokens, trained = tokens[: self.seq_length], trained[: self.seq_length]
            conversations.append((tokens, trained))
            counts["tokens"] += len(tokens)
            counts["trained"] += sum(trained[1:])
        return EncodedBlock(block, len(lines), self._pack(conversations), refused, counts)

    @staticmethod
    def _pack(conversations: list[tuple[list[int], list[bool]]]) -> dict[str, Packed]:
        lengths = np.fromiter((len(tokens) for tokens, _ in conversations), np.int32, len(conversations))
        size, ones = int(lengths.sum(dtype=np.int64)), np.ones(len(conversations), np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(tokens for tokens, _ in conversations), np.int64, size)
        mask = np.fromiter(itertools.chain.from_iterable(trained for _, trained in conversations), MASK_DTYPE, size)
        return {
            "tokens": Packed(pack_tokens(tokens, TOKEN_DTYPE), lengths, ones),
            "mask": Packed(mask, lengths, ones),
        }


def _check(options: SFTOptions, tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """Returns the tokenizer, which must have chat templates, after checking the options. Raises ConfigError."""
    for flag, value, least in (
        ("workers", options.workers, 1),
        ("log-interval", options.log_interval, 1),
        ("seq-length", 2 if options.seq_length is None else options.seq_length, 2),
    ):
        if value < least:
            raise ConfigError(f"--{flag} is {value}; give at least {least}")
    if options.truncate and options.seq_length is None:
        raise ConfigError("--truncate has no effect without a length; give --seq-length")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ConfigError(
            "chat templates belong to Hugging Face tokenizers; give --tokenizer-type HuggingFaceTokenizer"
        )
    return tokenizer
