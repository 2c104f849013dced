"""Brace expansion: `{a,b}` and `{1..3}` make several words of one, before anything else in them is expanded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.scope import MOST_TEXT
from megatron.tooling.launch_script.shell.syntax import Word, WordPart

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
_Piece = str | WordPart  # one unquoted character, or a part that braces leave as it is
_Pieces = tuple[_Piece, ...]


def spread(word: Word) -> list[Word]:
    """Returns the words that a word with braces stands for; the word itself if it has none."""
    if not any(part.kind == "text" and not part.quoted and "{" in part.text for part in word.parts):
        return [word]
    pieces: list[_Piece] = []
    for part in word.parts:
        pieces += part.text if part.kind == "text" and not part.quoted else [part]
    return [_word(alternative) for alternative in _alternatives(tuple(pieces))]


def _alternatives(pieces: _Pieces) -> list[_Pieces]:
    for start, piece in enumerate(pieces):
        end = _end(pieces, start) if piece == "{" else None
        inside = None if end is None else _inside(pieces[start + 1 : end])
        if inside is not None and end is not None:
            rests = _alternatives(pieces[end + 1 :])
            if len(inside) * len(rests) * len(pieces) > MOST_TEXT:
                raise ConfigError("braces make more words than a command may have; give the training command itself")
            return [(*pieces[:start], *middle, *ending) for middle in inside for ending in rests]
    return [pieces]


def _end(pieces: _Pieces, start: int) -> int | None:
    depth = 0
    for at in range(start, len(pieces)):
        depth += {"{": 1, "}": -1}.get(pieces[at], 0) if isinstance(pieces[at], str) else 0  # type: ignore[arg-type]
        if depth == 0:
            return at
    return None


def _inside(pieces: _Pieces) -> list[_Pieces] | None:
    """Returns what the text between two braces stands for; None if the braces are plain text."""
    if all(isinstance(piece, str) for piece in pieces):
        counted = _RANGE.fullmatch("".join(map(str, pieces)))
        if counted is not None:
            return _counted(counted[1], counted[2], counted[3])
    depth, starts = 0, [0]
    for at, piece in enumerate(pieces):
        depth += (piece == "{") - (piece == "}")
        if piece == "," and depth == 0:
            starts.append(at + 1)
    if len(starts) == 1:
        return None
    ends = [*(start - 1 for start in starts[1:]), len(pieces)]
    return [
        alternative for start, end in zip(starts, ends, strict=True) for alternative in _alternatives(pieces[start:end])
    ]


def _counted(first: str, last: str, step: str | None) -> list[_Pieces] | None:
    if first.isalpha() != last.isalpha():
        return None
    start, stop = (ord(first), ord(last)) if first.isalpha() else (int(first), int(last))
    stride = max(1, abs(int(step or 1)))
    if abs(stop - start) > MOST_TEXT:
        raise ConfigError("braces make more words than a command may have; give the training command itself")
    numbers: Sequence[int] = range(start, stop + 1, stride) if stop >= start else range(start, stop - 1, -stride)
    padded = any(re.match(r"-?0\d", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [tuple(chr(number) if first.isalpha() else f"{number:0{width}d}") for number in numbers]


def _word(pieces: _Pieces) -> Word:
    parts: list[WordPart] = []
    for piece in pieces:
        if isinstance(piece, WordPart):
            parts.append(piece)
        elif parts and parts[-1].kind == "text" and not parts[-1].quoted:
            parts[-1] = WordPart("text", parts[-1].text + piece, False)
        else:
            parts.append(WordPart("text", piece, False))
    return Word(tuple(parts))
