"""Files that the planner reads, and damaged versions of them: clusters (TOML), profiles (JSON) and tables of runs
(CSV)."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.planner.profiles import profile_of

KINDS = ("cluster", "profile", "rows")
SUFFIX = {"cluster": ".toml", "profile": ".json", "rows": ".csv"}
MOST = 10**6  # numbers of damaged versions
_ROWS = 3
_TABLE = Path(__file__).parents[2] / "benchmarks" / "planner" / "calibration.csv"
_CLUSTER = {
    "nodes": 1,
    "devices_per_node": 2,
    "network_gb_per_s": 25.0,
    "host_gb_per_s": 12.0,
    "host_memory_gib": 256.0,
    "host_memory_gb_per_s": 100.0,
    "device": {
        "like": "h100",
        "memory_gib": 40.0,
        "bandwidth_gb_per_s": 1500.0,
        "link_gb_per_s": 300,
        "processors": 108,
        "bf16_tflops": 312.0,
        "bf16_matmul_tflops": 250.0,
        "fp8_tflops": 600.0,
        "fp8_matmul_tflops": 500.0,
    },
}


class _Raw(str):
    """Text that stands in the file as it is."""


_NUMBERS = (0, 1, 2, 3, -1, 0.5, -0.0, -2.5, 1e-320, 1e-30, 1e12, 1e29, 1e300, 2**63, 10**40, 10**400)
_OTHERS = (
    *(math.nan, math.inf, -math.inf, True, False, "", " ", "x", "1", "h100", "none", "\u0663", "a" * 3000, [], {}, [1]),
    *({"a": 1}, [[{}]], _Raw("1" * 5000), _Raw("[" * 3000 + "]" * 3000), _Raw("null"), _Raw("1979-05-27"), _Raw("\0")),
)
_FACTORS = (0.0, -1.0, 1e-200, 1e-12, 1e-6, 0.5, 3.0, 1e6, 1e12, 1e100, 1e290)


def good(kind: str) -> str:
    """Returns the text of a file that is right."""
    return {"cluster": lambda: _toml(_CLUSTER), "profile": lambda: _json(_profile()), "rows": lambda: _csv(*_rows())}[
        kind
    ]()


def damaged(kind: str, number: int) -> bytes:
    """Returns version `number` of a file that is damaged in one to three places, which may still be right."""
    draw = random.Random(f"{kind}:{number}")
    places = draw.choice((1, 1, 2, 3))
    if kind == "rows":
        text = _damaged_rows(draw, places)
    else:
        words = json.loads(json.dumps(_CLUSTER if kind == "cluster" else _profile()))
        for _ in range(places):
            _damage(draw, words)
        text = _toml(words) if kind == "cluster" else _json(words)
    if draw.random() < 0.12:
        return _with_noise(draw, text.encode())
    return text.encode()


def write_named(folder: Path, words: Sequence[str]) -> dict[str, str]:
    """Writes the damaged versions that words name, as "{cluster_12}"; returns name -> path."""
    found = {}
    for kind, number in re.findall(rf"\{{({'|'.join(KINDS)})_(\d+)\}}", " ".join(words)):
        path = folder / f"{kind}_{number}{SUFFIX[kind]}"
        path.write_bytes(damaged(kind, int(number)))
        found[f"{kind}_{number}"] = str(path)
    return found


def _with_noise(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content) or 1)
    noise = draw.choice((b"", b"\xff\xfe", b"\0", b'"', b"\n\n", b"]", b"=", b"\xef\xbb\xbf"))
    return draw.choice(
        (content[:at], content[:at] + noise + content[at + 1 :], content[:at] + noise + content[at:], b"")
    )


def _profile() -> dict[str, Any]:
    return dataclasses.asdict(profile_of()) | {"shape": dict(profile_of().shape)}


def _damage(draw: random.Random, words: dict[str, Any]) -> None:
    """Changes one value of the tree, or which keys a table has."""
    place: Any = words
    key = draw.choice(list(place) or [""])
    while isinstance(place.get(key) if isinstance(place, dict) else place[key], dict | list) and place[key]:
        if draw.random() < 0.15:
            break
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    how = draw.random()
    if how < 0.12 and place:
        place.pop(key, None) if isinstance(place, dict) else place.pop(key)
    elif how < 0.2 and isinstance(place, dict):
        place[draw.choice(("", "a b", "nodes", "device", "like", "x" * 2000, "\u00e9\n"))] = draw.choice(_NUMBERS)
    elif how < 0.25 and isinstance(place, list):
        place.append(place[key])
    elif how < 0.6 and type(place[key] if isinstance(place, list) else place.get(key)) in (int, float):
        place[key] = type(place[key])(min(1e300, float(min(place[key], 10**300)) * draw.choice(_FACTORS)))
    else:
        place[key] = draw.choice(_NUMBERS if draw.random() < 0.5 else _OTHERS)


def _rows() -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of measured runs, the first one an anchor."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        columns, *rows = [line for _, line in zip(range(_ROWS + 1), csv.reader(file), strict=False)]
    return ["use", *columns], [["" if number else "anchor", *row] for number, row in enumerate(rows)]


def _damaged_rows(draw: random.Random, places: int) -> str:
    columns, rows = _rows()
    for _ in range(places):
        row, at, how = draw.choice(rows), draw.randrange(min(len(columns), 40)), draw.random()
        if how < 0.08:
            columns[at] = draw.choice(("", "x", columns[0], "\ufeffid"))
        elif how < 0.14:
            del row[at:]
        elif how < 0.18:
            row.append("more")
        elif how < 0.22:
            rows[:] = rows[:1]
            columns = columns[:at]
        else:
            value = draw.choice((*_NUMBERS, *_OTHERS))
            row[at : at + 1] = [
                value if isinstance(value, str) else repr(value) if value != 10**400 else "1" + "0" * 400
            ]
    return _csv(columns, rows)


def _csv(columns: list[str], rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows([columns, *rows])
    return file.getvalue()


def _toml(words: dict[str, Any]) -> str:
    """Tables behind the keys of the top, as people write them."""
    lines = [f"{_key(key)} = {_value(value, ' = ')}" for key, value in words.items() if not _is_table(key, value)]
    for key, value in words.items():
        if _is_table(key, value):
            lines += [f"[{_key(key)}]", *(f"{_key(name)} = {_value(each, ' = ')}" for name, each in value.items())]
    return "\n".join(lines) + "\n"


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and key == "device"


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key)


def _json(words: dict[str, Any]) -> str:
    return _value(words, ": ")


def _value(value: Any, between: str) -> str:
    """A value in JSON, or in TOML, whose tables have another sign between key and value."""
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        inside = (f"{json.dumps(key)}{between}{_value(each, between)}" for key, each in value.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each, between) for each in value) + "]"
    if isinstance(value, float) and between == " = ":
        return repr(value)
    return json.dumps(value)
