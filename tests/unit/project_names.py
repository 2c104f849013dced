"""The names of this project's sources, against which the documentation's names are checked."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron", "tools", "tests", "benchmarks", "examples", "docs")
_WORD = re.compile(r"[A-Za-z_]\w*")
_FLAG = re.compile(r"--[a-z][\w-]*")


@dataclass
class Names:
    """members: class or module stem -> names defined in it. words: identifiers, and words of strings. flags: with
    dashes.

    Tables of data have words, too; docstrings and the documentation's own tests do not count.
    """

    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    words: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)

    def has_member(self, owner: str, name: str) -> bool:
        """Whether a class of this name, one of its bases or a module defines the name."""
        return name in self.members[owner] or any(self.has_member(base, name) for base in self.bases[owner])


def sources() -> list[Path]:
    """The files and folders of the project."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return [*(ROOT / folder for folder in FOLDERS), *inside, *(path for path in ROOT.iterdir() if path.is_file())]


def _docstrings(tree: ast.AST) -> set[int]:
    """The ids of the nodes that are docstrings."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    first = (body[0] for body in bodies if body)
    return {id(node.value) for node in first if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """The names that the statements of a module or a class bind, with the attributes that methods assign."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


def _read(names: Names, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names.members[path.stem].update(_defined(tree.body))
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                names.members[name].update(_defined(node.body))
                names.bases[name].update(base.id for base in node.bases if isinstance(base, ast.Name))
                names.words.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name):
                names.words.add(name)
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.words.add(name)
            case ast.alias(name=name):
                names.words.update(name.split("."))
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names.words.update(_WORD.findall(text))
                names.flags.update(_FLAG.findall(text))


@functools.cache
def project_names() -> Names:
    """The names of all Python files of the project, of its table of flags and of its list of flags."""
    names = Names()
    for path in sources():
        if path.suffix == ".py" and path.name != "test_docs.py":
            _read(names, path)
        elif path.suffix in (".csv", ".cpp", ".sh", ".toml"):
            names.words.update(_WORD.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "docs" / "flags.md", ROOT / "megatron" / "config" / "flag_table.csv"):
        names.flags.update(_FLAG.findall(path.read_text(encoding="utf-8")))
    return names
