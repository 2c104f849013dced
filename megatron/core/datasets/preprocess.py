"""JSON lines -> `.bin/.idx`: workers read, parse, tokenize and pack blocks of lines; the main process only writes.

The output does not depend on the number of workers. Memory is a few blocks per worker.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from megatron.base.errors import ConfigError, DataError, UserError
from megatron.base.log import get_logger
from megatron.core.datasets.indexed import IndexedDatasetWriter, merge_datasets, pack_tokens, token_dtype
from megatron.core.datasets.jsonl import FileBlock, find_inputs, parse_texts, read_blocks
from megatron.core.datasets.scratch import is_left, open_held
from megatron.core.datasets.tokenizer import Tokenizer

LOGGER = get_logger(__name__)
ON_ERROR = ("stop", "skip")
SHOWN_REASONS = 5  # the number of lines that --on-error skip names individually
HELD = "held"  # the file in a scratch folder that its run keeps locked
BLOCKS_AHEAD = 4  # blocks queued per worker: enough that none idles while another works on a slow block


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """The inputs and the layout of the output; the fields are the flags of tools/preprocess_data.py."""

    input: tuple[str, ...]
    output_prefix: str
    workers: int
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    partitions: int = 1
    keep_sequential_samples: bool = False
    log_interval: int = 1000
    on_error: str = "stop"


@dataclass(frozen=True)
class Packed:
    """Documents of one key: tokens in the file's type, tokens per sequence, sequences per document."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedBlock:
    """The result of a worker for one block.

    `refused` lists (line of the block from 0, reason) of the rejected lines; with --on-error stop it is only the first
    of them, and there are no documents.
    """

    block: FileBlock
    lines: int
    packed: dict[str, Packed] = field(default_factory=dict)
    refused: Sequence[tuple[int, str]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # added up in the summary


@dataclass(frozen=True)
class Summary:
    """The totals of a run. `bytes` counts the JSON lines before compression; `counts` sums the counts of the blocks."""

    documents: int
    tokens: int
    skipped: int  # lines skipped by --on-error skip
    bytes: int
    seconds: float
    counts: Counter[str]


def preprocess(options: PreprocessOptions, tokenizer: Tokenizer) -> Summary:
    """Writes `{output_prefix}_{key}_document.bin/.idx` for every key, all or nothing.

    Line i is document i. A document without tokens keeps its position in the document index, has no sequence and gets
    no end-of-document token, as in Megatron-LM. With partitions > 1, document i goes to partition i mod partitions and
    the partitions are written one after another, as Megatron-LM does unless --keep-sequential-samples is given.

    Raises DataError with the file and line for a line that cannot be used, unless --on-error skip skips it, and
    ConfigError for impossible options.
    """
    for flag in ("workers", "partitions", "log_interval"):
        if vars(options)[flag] < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {vars(options)[flag]}; give at least 1")
    paths = find_inputs(options.input)
    parts = 1 if options.keep_sequential_samples else options.partitions
    try:
        with ExitStack() as stack:
            outputs = {
                key: stack.enter_context(
                    Output(f"{options.output_prefix}_{key}_document", token_dtype(tokenizer.vocab_size), parts)
                )
                for key in dict.fromkeys(options.json_keys)
            }
            keys = tuple(dict.fromkeys(options.json_keys))
            encoder = BlockEncoder(tokenizer, keys, options.append_eod, options.on_error)
            summary = write_blocks(
                encode_blocks(paths, encoder, options.workers), outputs, options.log_interval, options.on_error
            )
            if not summary.documents:
                why = f"; all of its {summary.skipped} lines were skipped" if summary.skipped else ""
                raise DataError(
                    f"--input {' '.join(options.input)} holds no documents{why}; give files with JSON lines"
                )
            for output in outputs.values():
                output.finalize()
    except OSError as error:
        raise DataError(f"preprocessing into {options.output_prefix} failed: {error}") from error
    return summary


class BlockEncoder(Dataset[EncodedBlock]):
    """Maps a block to packed documents. It is sent to worker processes and therefore holds everything they need."""

    def __init__(self, tokenizer: Tokenizer, keys: Sequence[str], append_eod: bool, on_error: str) -> None:
        self.tokenizer, self.keys, self.append_eod, self.on_error = tokenizer, keys, append_eod, on_error
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __getitem__(self, block: FileBlock) -> EncodedBlock:
        lines = block.lines()
        documents: dict[int, list[list[str]]] = {}  # by line
        refused: list[tuple[int, str]] = []
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                documents[number] = parse_texts(line, self.keys)
            except ValueError as error:
                refused.append((number, str(error)))
                if self.on_error == "stop":
                    return EncodedBlock(block, len(lines), refused=refused)
        try:
            packed = self._pack_all(documents)
        except UserError:
            blamed = self._blame(documents)
            refused = sorted([*refused, *blamed.items()])
            if self.on_error == "stop":
                return EncodedBlock(block, len(lines), refused=refused[:1])
            packed = self._pack_all({number: texts for number, texts in documents.items() if number not in blamed})
        return EncodedBlock(block, len(lines), packed, refused)

    def _pack_all(self, documents: Mapping[int, list[list[str]]]) -> dict[str, Packed]:
        return {key: self._pack([texts[i] for texts in documents.values()]) for i, key in enumerate(self.keys)}

    def _pack(self, documents: Sequence[Sequence[str]]) -> Packed:
        """Tokenizes the texts of documents in one call, so that the library is entered once per block."""
        ids = iter(self.tokenizer.encode_batch([text for texts in documents for text in texts]))
        encoded: list[list[int]] = []
        sequences = np.empty(len(documents), np.int64)
        for number, texts in enumerate(documents):
            document = [sequence for sequence in itertools.islice(ids, len(texts)) if sequence]
            if document and self.append_eod:
                document[-1].append(self.tokenizer.eod)
            sequences[number] = len(document)
            encoded.extend(document)
        lengths = np.fromiter(map(len, encoded), np.int32, len(encoded))
        tokens = np.fromiter(itertools.chain.from_iterable(encoded), np.int64, int(lengths.sum(dtype=np.int64)))
        return Packed(pack_tokens(tokens, self.dtype), lengths, sequences)

    def _blame(self, documents: Mapping[int, list[list[str]]]) -> dict[int, str]:
        """Returns the lines that the tokenizer rejects individually, with the reasons."""
        blamed: dict[int, str] = {}
        for number, texts in documents.items():
            try:
                self._pack_all({number: texts})
            except UserError as error:
                blamed[number] = f"cannot be tokenized: {error}"
        assert blamed, "a batch was refused of which every text is accepted"
        return blamed


class Output:
    """The dataset at `prefix`, written directly, or distributed over parts that are joined at the end."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], parts: int = 1) -> None:
        self._stack = ExitStack()
        self._prefix, self._documents = prefix, 0
        self._part_prefixes = [prefix]
        if parts > 1:
            scratch = self._stack.enter_context(_scratch_folder(Path(prefix)))
            self._part_prefixes = [f"{scratch}/{number:06}" for number in range(parts)]
        self._writers = [self._stack.enter_context(IndexedDatasetWriter(part, dtype)) for part in self._part_prefixes]

    def add(self, packed: Packed) -> None:
        """Appends documents, distributing them over the parts in turn."""
        parts = len(self._writers)
        if parts == 1:
            self._writers[0].add_documents(packed.tokens, packed.lengths, packed.sequences)
            return
        document = (self._documents + np.arange(len(packed.sequences))) % parts
        sequence = np.repeat(document, packed.sequences)
        token = np.repeat(sequence, packed.lengths)
        for number, writer in enumerate(self._writers):
            writer.add_documents(
                packed.tokens[token == number],
                packed.lengths[sequence == number],
                packed.sequences[document == number],
            )
        self._documents += len(packed.sequences)

    def finalize(self) -> None:
        """Moves the dataset to its final name."""
        for writer in self._writers:
            writer.finalize()
        if len(self._writers) > 1:
            merge_datasets(self._part_prefixes, self._prefix)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.close()


@contextlib.contextmanager
def _scratch_folder(prefix: Path) -> Iterator[Path]:
    """Yields a folder next to the dataset, removed at the end; folders of killed runs are removed at the beginning."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    name = f".{prefix.name}.partitions."
    for other in list(prefix.parent.iterdir()):
        if other.name.startswith(name) and is_left(other / HELD):
            shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix=name, dir=prefix.parent) as folder, open_held(Path(folder, HELD)):
        yield Path(folder)


def encode_blocks(paths: Sequence[str], encoder: Dataset[EncodedBlock], workers: int) -> Iterator[EncodedBlock]:
    """Yields the blocks of all files in order, encoded by worker processes. Raises DataError if a worker is killed."""
    loader: DataLoader[EncodedBlock] = DataLoader(
        encoder,
        sampler=itertools.chain.from_iterable(map(read_blocks, paths)),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=BLOCKS_AHEAD,
        worker_init_fn=_start_worker,
    )
    try:
        yield from loader
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise DataError(
            f"a worker process was killed: {error}; if memory ran out, lower --workers, now {workers}"
        ) from error


def write_blocks(
    blocks: Iterator[EncodedBlock], outputs: Mapping[str, Output], log_interval: int, on_error: str
) -> Summary:
    """Appends the blocks to the outputs of their keys.

    A rejected line raises a DataError with its file and number; with on_error "skip" it is counted, and the first few
    are logged.
    """
    start, counts = time.monotonic(), Counter[str]()
    documents = tokens = skipped = size = line = 0
    path = ""
    for encoded in blocks:
        if encoded.block.path != path:
            path, line = encoded.block.path, 0
        for number, reason in encoded.refused:
            where = f"{path}, line {line + number + 1}: {reason}"
            if on_error == "stop":
                raise DataError(f"{where} (--on-error skip leaves such lines out and counts them)")
            if skipped < SHOWN_REASONS:
                LOGGER.warning("skipped %s", where)
            skipped += 1
        before = documents
        for key, packed in encoded.packed.items():
            outputs[key].add(packed)
            tokens += packed.tokens.size
        documents += len(next(iter(encoded.packed.values())).sequences)
        size += encoded.block.stop - encoded.block.start
        line += encoded.lines
        counts.update(encoded.counts)
        if documents // log_interval > before // log_interval:
            seconds = time.monotonic() - start
            LOGGER.info(
                "Processed %d documents (%.1f docs/s, %.2f MB/s).", documents, documents / seconds, size / 1e6 / seconds
            )
    if skipped:
        LOGGER.warning("skipped %d lines of %d", skipped, skipped + documents + counts["dropped"])
    return Summary(documents, tokens, skipped, size, time.monotonic() - start, counts)


def _start_worker(_: int) -> None:
    # The processes provide the parallelism: a thread pool in each would only compete for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
