"""Rows of prompt files: one JSON object per line, plain or gzip, or Parquet."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.base.errors import ConfigError, DataError, first_line
from megatron.core.datasets.jsonl import find_inputs, parse_object, read_blocks

FLAG = "--prompt-data"
_PARQUET = ".parquet"


def read_rows(patterns: Sequence[str], flag: str = FLAG) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row) of all files in order; the place is the file with the number of the line or row, from 1.

    Blank lines are skipped. flag: the one that names the files, for messages. Raises DataError for a file that is
    missing, cannot be read or holds something else, and ConfigError for Parquet without the package that reads it.
    """
    for path in find_inputs(patterns, flag, ".jsonl, .jsonl.gz or .parquet files"):
        rows = _parquet_rows(path, flag) if path.endswith(_PARQUET) else _json_rows(path, flag)
        for number, row in rows:
            yield f"{path}, {'row' if path.endswith(_PARQUET) else 'line'} {number}", row


def _json_rows(path: str, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        for block in read_blocks(path):
            for line in block.lines():
                number += 1
                if line.strip():
                    yield number, parse_object(line)
    except ValueError as error:
        raise DataError(f"{flag} {path}, line {number} {error}") from error
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error}") from error


def _parquet_rows(path: str, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{flag} {path} needs the pyarrow package, which is not installed; pip install 'megatron-patched[parquet]',"
            " or give JSON lines"
        ) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:  # the errors of the library are ValueErrors, too
        raise DataError(f"{flag} {path} cannot be read: {first_line(error)}") from error
