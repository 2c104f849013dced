"""The outcome of one case of the checklist: a line of results.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError

OK, FAILED, TIMEOUT, CRASHED = "ok", "failed", "timeout", "crashed"
MISSING, SKIPPED = "missing", "skipped"
STATUSES = (OK, FAILED, TIMEOUT, CRASHED, MISSING, SKIPPED)
BAD = (FAILED, TIMEOUT, CRASHED)
ENDED = (OK, FAILED, TIMEOUT, CRASHED, MISSING)
LISTED = "failures"  # the value of a record whose lines report.md lists
START = "(start)"  # the case of a part whose cases could not be listed


class NotRunError(Exception):
    """A case cannot run here. `status` is that of its record, the message the reason."""

    status = SKIPPED


class MissingError(NotRunError):
    """A package that the case measures is not installed."""

    status = MISSING

    def __init__(self, package: str) -> None:
        super().__init__(f"missing: package {package}")


@dataclass(frozen=True)
class Record:
    """One case: its part's letter, its outcome, its seconds, and its figures or the reason, in words and as values."""

    part: str
    case: str
    status: str
    seconds: float
    text: str
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The part's letter and the case's name."""
        return f"{self.part} {self.case}"

    @staticmethod
    def start(part: str) -> str:
        """Returns the title of the record of a part whose cases could not be listed."""
        return f"{part} {START}"

    @property
    def bad(self) -> bool:
        """Whether the case ran and did not end well."""
        return self.status in BAD

    def to_json(self) -> str:
        """Returns the record as one line. What JSON does not have, such as NaN, becomes words."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and value - value != 0.0 else value


def read_records(path: Path) -> list[Record]:
    """Returns the records of a results.jsonl. Raises ConfigError for another file; a last line cut short is left
    out."""
    found: list[Record] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            found.append(Record(**json.loads(line)))
        except (ValueError, TypeError):
            if number == len(lines) and found:
                break
            raise ConfigError(f"{path}, line {number} is no record; give the results.jsonl of a run") from None
    return found


def titles(records: Sequence[Record], statuses: Collection[str]) -> set[str]:
    """Returns the titles of the cases whose last record has one of the statuses."""
    last = {record.title: record.status for record in records}
    return {title for title, status in last.items() if status in statuses}
