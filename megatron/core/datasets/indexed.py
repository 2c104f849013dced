"""Megatron's `.bin/.idx` token files, byte for byte: reading, writing, appending.

`.bin` holds raw tokens back to back. `.idx`, little-endian, holds

| bytes | content |
|---|---|
| 9 | magic `MMIDIDX\\0\\0` |
| 8, 1 | version 1; code of the token type |
| 8, 8 | N sequences; D = documents + 1 |
| 4N | int32 tokens of each sequence |
| 8N | int64 byte offset of each sequence in `.bin` |
| 8D | int64 first sequence of each document, then N |
| N or 0 | int8 modes, which only multimodal files have |

Sequences lie back to back and fill the `.bin`, so an altered offset or length contradicts the others and is found.

A document is one sequence unless its text was given as a list, which makes one sequence per item. A document without
tokens has no sequence. The layout is Megatron-LM's (megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError
from megatron.core.datasets.scratch import is_left, open_held

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHECKED_AT_ONCE = 1 << 20  # entries of an index in host memory per step of the check
COPIED_AT_ONCE = 1 << 24  # bytes


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns uint16 for vocabularies below 65500 and int32 otherwise, which is the rule of Megatron's writer."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def pack_tokens(tokens: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns `tokens` as a one-dimensional array of `dtype`. Raises DataError if a token does not fit in it."""
    wide = np.asarray(tokens, dtype=np.int64).reshape(-1)
    if dtype.kind in "iu" and wide.size:
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high > np.iinfo(dtype).max:
            raise DataError(
                f"token ids {low} to {high} do not fit in {dtype.name} (0 to {np.iinfo(dtype).max}); "
                "the tokenizer gives ids above its own vocabulary size"
            )
    return wide.astype(dtype)


class IndexedDataset:
    """The sequences of tokens in a `.bin/.idx` pair, read on demand.

    `sequence_lengths` [N] int32, `sequence_pointers` [N] int64 (bytes) and `document_indices` [D] int64 are memory maps
    of the `.idx`, which is read once and checked (0.1 s per 10 million sequences). The `.bin` is read with plain reads:
    they cost about 2 us more per sequence than a memory map, but if the file is truncated while in use or the disk
    fails, one read raises an error, while a memory map would end the process with SIGBUS.

    Raises DataError for a file that is missing, damaged or of another format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = f"{prefix}.idx", f"{prefix}.bin"
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                raise DataError(
                    f"{path} does not exist; give the dataset's path without its extension, "
                    "or make the dataset with tools/preprocess_data.py"
                )
        self.dtype, sequences, documents = _read_header(self.idx_path)
        buffer = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        self.sequence_lengths, remaining = _cut(buffer[HEADER.size :], np.dtype("<i4"), sequences)
        self.sequence_pointers, remaining = _cut(remaining, np.dtype("<i8"), sequences)
        self.document_indices, _ = _cut(remaining, np.dtype("<i8"), documents)
        self._check()
        self._file = open(self.bin_path, "rb", buffering=0)  # noqa: SIM115, open as long as this is

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        # A pickled memory map would contain the whole file; a worker process opens the file again.
        return IndexedDataset, (self.prefix,)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns tokens [offset, offset + length) of one sequence, in the file's type; to its end if `length` is None.

        The array is read-only. Raises DataError if the file has become shorter or cannot be read.
        """
        size = int(self.sequence_lengths[sequence])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise IndexError(f"tokens {offset} to {offset + count} of sequence {sequence}, which has {size}")
        start = int(self.sequence_pointers[sequence]) + offset * self.dtype.itemsize
        try:
            read = os.pread(self._file.fileno(), count * self.dtype.itemsize, start)
        except OSError as error:
            raise DataError(f"{self.bin_path} cannot be read at byte {start}: {error.strerror}") from error
        tokens = np.frombuffer(read[: len(read) // self.dtype.itemsize * self.dtype.itemsize], dtype=self.dtype)
        if len(tokens) != count:
            raise DataError(
                f"{self.bin_path} ends before tokens {offset} to {offset + count} of sequence {sequence}, "
                f"which {self.idx_path} places at byte {start}; make the dataset again"
            )
        return tokens

    def _check(self) -> None:
        """Checks that sequences and documents are in order and fill the `.bin`, which the header cannot show."""
        sequences = len(self)
        if len(self.document_indices) < 1 or self.document_indices[0] != 0 or self.document_indices[-1] != sequences:
            shown = self.document_indices[[0, -1]].tolist() if len(self.document_indices) else []
            raise self._damage(f"its documents must run from sequence 0 to {sequences}, found {shown}")
        for first in range(0, len(self.document_indices) - 1, CHECKED_AT_ONCE):
            bounds = self.document_indices[first : first + CHECKED_AT_ONCE + 1]
            if falls := np.flatnonzero(bounds[1:] < bounds[:-1])[:1].tolist():
                start, next_start = bounds[falls[0] : falls[0] + 2].tolist()
                raise self._damage(
                    f"document {first + falls[0]} must not begin after document {first + falls[0] + 1}, "
                    f"found sequences {start} and {next_start}"
                )
        end = self._check_sequences()
        size = os.path.getsize(self.bin_path)
        if size != end:
            raise DataError(
                f"{self.bin_path} has {size} bytes but {self.idx_path} describes {end}; "
                "one of them was cut short or is of another dataset: copy or make both again"
            )

    def _check_sequences(self) -> int:
        """Returns the bytes of all sequences, which must follow each other without a gap."""
        end = 0
        for first in range(0, len(self), CHECKED_AT_ONCE):
            lengths = self.sequence_lengths[first : first + CHECKED_AT_ONCE]
            if negative := np.flatnonzero(lengths < 0)[:1].tolist():
                raise self._damage(f"sequence {first + negative[0]} has {lengths[negative[0]]} tokens")
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            pointers = self.sequence_pointers[first : first + CHECKED_AT_ONCE]
            starts = np.concatenate([[end], ends[:-1]])
            if wrong := np.flatnonzero(pointers != starts)[:1].tolist():
                raise self._damage(
                    f"sequence {first + wrong[0]} must begin at byte {starts[wrong[0]]} of the .bin, "
                    f"found {pointers[wrong[0]]}"
                )
            end = int(ends[-1])
        return end

    def _damage(self, what: str) -> DataError:
        return DataError(f"{self.idx_path} is damaged: {what}; copy it or make the dataset again")


class IndexedDatasetWriter:
    """Writes a `.bin/.idx` pair under temporary names; `finalize` syncs the files and renames them.

    Use it as a context manager: leaving the block without `finalize`, with or without an error, removes the temporary
    files. Files left by a killed writer of the same name are removed first.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"tokens cannot be stored as {self.dtype}; use one of {', '.join(map(str, CODES))}")
        self._bin_path, self._idx_path = (f"{prefix}.{kind}.{os.getpid()}.tmp" for kind in ("bin", "idx"))
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._sequences = 0
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            _remove_left(Path(prefix))
            self._file = open_held(Path(self._bin_path))  # closed by finalize or __exit__
        except OSError as error:
            raise DataError(f"cannot write {prefix}.bin: {error}; choose another --output-prefix") from error

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Adds one document; `lengths` splits its tokens into sequences (default one, or none if there are no
        tokens)."""
        packed = pack_tokens(tokens, self.dtype)
        if lengths is None:
            lengths = [packed.size] if packed.size else []
        self.add_documents(packed, np.asarray(lengths, np.int32), np.array([len(lengths)]))

    def add_documents(
        self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int32], sequences: npt.NDArray[np.int64]
    ) -> None:
        """Adds many documents: all tokens in the file's type, tokens per sequence, and sequences per document."""
        assert tokens.dtype == self.dtype and lengths.sum() == tokens.size and sequences.sum() == lengths.size
        self._file.write(tokens.tobytes())
        self._append(lengths, self._sequences + np.cumsum(sequences, dtype=np.int64))

    def add_dataset(self, prefix: str | Path) -> None:
        """Appends all documents of another dataset. Raises DataError if its tokens are of another type."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.idx_path} holds {other.dtype} tokens and {self.prefix} {self.dtype}: they come from "
                "tokenizers of different size; make both with the same tokenizer"
            )
        lengths = np.array(other.sequence_lengths, np.int32)
        with open(other.bin_path, "rb") as tokens:
            shutil.copyfileobj(tokens, self._file, COPIED_AT_ONCE)
        self._append(lengths, self._sequences + np.asarray(other.document_indices[1:], np.int64))

    def finalize(self) -> None:
        """Writes the index, syncs both files and renames them. A reader sees the old pair, none, or the new one."""
        lengths = np.concatenate([*self._lengths, np.zeros(0, np.int32)]).astype("<i4")
        documents = np.concatenate(self._documents).astype("<i8")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(documents))
        with self._file, open(self._idx_path, "wb") as index:
            for part in (header, lengths.tobytes(), pointers.astype("<i8").tobytes(), documents.tobytes()):
                index.write(part)
            for file in (self._file, index):
                file.flush()
                os.fsync(file.fileno())
        # The old index is removed first and the new one placed last, so an index never belongs to the tokens of
        # another.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        os.replace(self._bin_path, f"{self.prefix}.bin")
        os.replace(self._idx_path, f"{self.prefix}.idx")

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for path in (self._bin_path, self._idx_path):
            Path(path).unlink(missing_ok=True)

    def _append(self, lengths: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> None:
        self._lengths.append(lengths)
        self._documents.append(ends)
        self._sequences += len(lengths)


def merge_datasets(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Concatenates datasets of one token type into one, in the order given."""
    if not prefixes:
        raise DataError(f"there is no dataset to merge into {output_prefix}; give at least one .bin/.idx pair")
    if Path(output_prefix).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise DataError(f"{output_prefix} is one of the datasets to merge; choose another --output-prefix")
    with IndexedDatasetWriter(output_prefix, IndexedDataset(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.add_dataset(prefix)
        writer.finalize()


def _remove_left(prefix: Path) -> None:
    """Removes temporary files of killed writers."""
    pattern = re.compile(re.escape(prefix.name) + r"\.bin\.(\d+)\.tmp")
    for path in list(prefix.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and int(match[1]) != os.getpid() and is_left(path):
            for kind in ("idx", "bin"):
                prefix.with_name(f"{prefix.name}.{kind}.{match[1]}.tmp").unlink(missing_ok=True)


def _read_header(path: str) -> tuple[np.dtype[Any], int, int]:
    """Returns the token type, N and D of an `.idx`, after checking the format and that its size agrees with them."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise DataError(f"{path} has {size} bytes, fewer than an index's header of {HEADER.size}; make it again")
    magic, version, code, sequences, documents = HEADER.unpack(raw)
    if magic != MAGIC:
        raise DataError(f"{path} is not a Megatron index: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path} has index version {version}; this program reads version {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path} names token type {code}, which is none of {sorted(DTYPES)}; make the dataset again")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{path} has {size} bytes but {sequences} sequences and {documents} document bounds need {expected}; "
            "the file is damaged: copy or make it again"
        )
    return DTYPES[code], sequences, documents


def _cut(buffer: npt.NDArray[np.uint8], dtype: np.dtype[Any], count: int) -> tuple[Any, npt.NDArray[np.uint8]]:
    size = count * dtype.itemsize
    # Return a plain array over the map: a slice of np.memmap takes microseconds longer each time.
    return np.asarray(buffer[:size]).view(dtype), buffer[size:]
