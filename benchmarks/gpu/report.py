"""The files and the table of the checklist's results. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.record import LISTED, OK, STATUSES, Record

TABLE_LINES, WIDTH = 40, 118


class Report:
    """Appends each record to results.jsonl, prints it, and rewrites report.md."""

    def __init__(self, out: Path, title: str, earlier: Sequence[Record] = ()) -> None:
        """Replaces the results in `out`, which exists. earlier: records of a run that this one resumes."""
        self._lines, self._page, self._title = out / "results.jsonl", out / "report.md", title
        self._records = list(earlier)
        self._lines.write_text("".join(record.to_json() + "\n" for record in earlier), encoding="utf-8")

    def add(self, record: Record) -> None:
        """Takes a record."""
        self._records.append(record)
        with open(self._lines, "a", encoding="utf-8") as lines:
            lines.write(record.to_json() + "\n")
        self._page.write_text(page(self._title, self._records), encoding="utf-8")
        print(line_of(record), flush=True)


def line_of(record: Record) -> str:
    """Returns one line, cut to WIDTH characters."""
    line = f"{record.part} {record.case}: {record.status}, {record.seconds:.1f} s; {record.text}"
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def page(title: str, records: Sequence[Record]) -> str:
    """Returns report.md: per part a table of its cases, and a list of the tests that failed."""
    lines = [f"# {title}", "", *_counts(records)]
    for letter in _letters(records):
        lines += ["", f"## {letter}: {PARTS[letter].title}" if letter in PARTS else f"## {letter}", ""]
        lines += ["| case | result | s | figures, or the reason |", "|---|---|---|---|"]
        for record in records:
            if record.part == letter:
                text = record.text.replace("|", "\\|")
                lines.append(f"| {record.case} | {record.status} | {record.seconds:.1f} | {text} |")
        listed = [line for record in records if record.part == letter for line in record.values.get(LISTED, ())]
        lines += ["", *(f"- {line}" for line in listed)] if listed else []
    return "\n".join(lines) + "\n"


def table(records: Sequence[Record], seconds: float) -> str:
    """Returns at most TABLE_LINES lines: the number of cases by part and result, then the cases that failed."""
    lines = [*_counts(records), f"{len(records)} cases in {seconds:.0f} s; figures and reasons are in report.md"]
    bad = [line_of(record) for record in records if record.bad]
    room = TABLE_LINES - len(lines)
    if len(bad) > room:
        bad = [*bad[: room - 1], f"and {len(bad) - room + 1} more failures in report.md"]
    return "\n".join(lines + bad)


def _counts(records: Sequence[Record]) -> list[str]:
    """Returns a table with one line per part."""
    found = {record.status for record in records}
    shown = [status for status in STATUSES if status == OK or status in found]
    lines = ["| part | " + " | ".join(shown) + " | s |", "|---|" + "---|" * (len(shown) + 1)]
    for letter in _letters(records):
        mine = [record for record in records if record.part == letter]
        counts = Counter(record.status for record in mine)
        cells = " | ".join(str(counts[status]) for status in shown)
        title = f"{letter} {PARTS[letter].title}" if letter in PARTS else letter
        lines.append(f"| {title} | {cells} | {sum(record.seconds for record in mine):.0f} |")
    return lines


def _letters(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.part for record in records))
