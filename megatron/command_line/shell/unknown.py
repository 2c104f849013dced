"""Text of which a part could not be known: that part stays as the script has it, between two marks.

The marks are characters of Unicode's private use, which no script has. Text with marks can be joined, split at blanks and
read again like any other; `plain` takes them out at the end.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_FIELD = re.compile(f"(?:[^\\s{OPEN}]|{OPEN}[^{CLOSE}]*{CLOSE})+")
_PLACEHOLDER = re.compile(r"<[A-Z]{2}[\w ,./-]*\w>")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")


def mark(source: str) -> str:
    """`source`, such as $DATA_PATH, as text that is not known."""
    return OPEN + plain(source) + CLOSE


def mark_placeholders(script: str) -> str:
    """A script in which <PATH TO THE DATASET> and the like, which bash would take for redirections, are unknown text."""
    return _PLACEHOLDER.sub(lambda found: mark(found[0]), script)


def plain(text: str) -> str:
    """Without marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def unknowns(text: str) -> list[str]:
    """What in it is not known, as the script has it."""
    return _MARKED.findall(text)


def is_known(text: str) -> bool:
    """Whether all of it is."""
    return OPEN not in text


def split(text: str) -> list[str]:
    """At blanks that are not inside marks."""
    return _FIELD.findall(text)


def as_if_unset(text: str) -> str | None:
    """With variables that nobody set read as empty, as bash does; None when something else is not known."""
    if any(_VARIABLE.fullmatch(source) is None for source in unknowns(text)):
        return None
    return _MARKED.sub("", text)
