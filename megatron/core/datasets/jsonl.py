"""Splits JSON-lines files into blocks of whole lines, which worker processes read and parse."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import DataError

# A block is about 0.1 s of tokenization: long compared with the cost of sending a block to a worker, short compared
# with the end of a run, where some processes wait for the last blocks of others.
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class FileBlock:
    """Bytes [start, stop) of a file, both at line starts. `data` holds them if the file cannot be read from an
    offset."""

    path: str
    start: int
    stop: int
    data: bytes | None = None

    def lines(self) -> list[bytes]:
        """Returns the block's lines without line ends."""
        data = self.data
        if data is None:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        return data.removesuffix(b"\n").split(b"\n")


def find_inputs(patterns: Sequence[str], flag: str = "--input", kinds: str = ".jsonl or .jsonl.gz files") -> list[str]:
    """Returns the files that the patterns of `flag` match, in the order given and sorted per pattern. Raises DataError
    for none, which names the `kinds` of files to give.
    """
    files: list[str] = []
    for pattern in patterns:
        paths = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
        if not paths:
            raise DataError(f"{flag} {pattern} names no file; give {kinds}, or a quoted pattern")
        files.extend(paths)
    return files


def read_blocks(path: str) -> Iterator[FileBlock]:
    """Yields the blocks of a file in order. For plain files only block ends are read here; `FileBlock.lines` reads the
    lines.
    """
    if not path.endswith(".gz"):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = 0
            while start < size:
                file.seek(min(start + BLOCK_BYTES, size))
                file.readline()
                yield FileBlock(path, start, file.tell())
                start = file.tell()
        return
    try:
        with gzip.open(path, "rb") as file:
            start = 0
            while data := file.read(BLOCK_BYTES):
                data += file.readline()
                yield FileBlock(path, start, start + len(data), data)
                start += len(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}; copy it again") from error


def parse_object(line: bytes) -> dict[str, Any]:
    """Returns one JSON object. Raises ValueError with the reason."""
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"is not JSON in UTF-8 ({error})") from error
    except RecursionError as error:
        raise ValueError("is JSON that is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    return record


def parse_texts(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Returns the texts under each key of one JSON object: one text, or the items of a list.

    Raises ValueError with the reason.
    """
    record = parse_object(line)
    texts_by_key: list[list[str]] = []
    for key in keys:
        if key not in record:
            raise ValueError(f"has no key '{key}', only {', '.join(sorted(record)) or 'none'}; see --json-keys")
        value = record[key]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"holds neither text nor a list of texts under '{key}'")
        if b"\\u" in line:
            check_surrogates(texts, key)
        texts_by_key.append(texts)
    return texts_by_key


def check_surrogates(texts: Sequence[str], key: str) -> None:
    """Raises ValueError for an unpaired surrogate.

    An escape such as \\ud83d without its second half makes a string that is not valid text; tokenizers fail on it.
    """
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"holds half of a surrogate pair under '{key}' (character {error.start})") from error
