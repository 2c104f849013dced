"""Text with unknown parts: such a part keeps the script's text, between two marks.

The marks are characters of Unicode's private use area, which no script contains. Text with marks can be joined, split
at blanks and parsed again like any other; `plain` removes them at the end.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_FIELD = re.compile(f"(?:[^\\s{OPEN}]|{OPEN}[^{CLOSE}]*{CLOSE})+")
_PLACEHOLDER = re.compile(r"<[A-Z]{2}[\w ,./-]*\w>")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")


def mark(source: str) -> str:
    """Returns `source`, such as $DATA_PATH, as unknown text."""
    return OPEN + plain(source) + CLOSE


def mark_placeholders(script: str) -> str:
    """Marks placeholders such as <PATH TO THE DATASET>, which bash would read as redirections, as unknown text."""
    return _PLACEHOLDER.sub(lambda match: mark(match[0]), script)


def plain(text: str) -> str:
    """Returns the text without marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def unknowns(text: str) -> list[str]:
    """Returns the unknown parts of a text, as written in the script."""
    return _MARKED.findall(text)


def is_known(text: str) -> bool:
    """Returns whether the whole text is known."""
    return OPEN not in text


def split(text: str) -> list[str]:
    """Splits a text at blanks outside marks."""
    return _FIELD.findall(text)


def as_if_unset(text: str) -> str | None:
    """Replaces unset variables by empty text, as bash does; returns None if another part is unknown."""
    if any(_VARIABLE.fullmatch(source) is None for source in unknowns(text)):
        return None
    return _MARKED.sub("", text)
