"""The documentation's links lead somewhere, and the source files that it names exist."""

import re
from pathlib import Path

import pytest

from tests.test_architecture import ROWS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
FOLDERS = ("megatron", "tools", "tests", "benchmarks", "examples")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([\w./-]+\.(?:py|cpp|csv|sbatch))`")


def prose(text: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE))
    return {title.strip().replace(" ", "-") for title in plain}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for link in LINK.findall(prose(text)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


def missing_files(text: str) -> list[str]:
    """Named source files that do not exist; a page may leave out the folders that lead to a file."""
    names = [path.relative_to(ROOT).as_posix() for path in (*SOURCES, *ROOT.glob("*.py"))]
    return [named for named in SOURCE.findall(text) if not any(f"/{name}".endswith(f"/{named}") for name in names)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
class TestPage:
    def test_links(self, page):
        assert dead_links(page, page.read_text(encoding="utf-8")) == []

    def test_named_files(self, page):
        assert missing_files(page.read_text(encoding="utf-8")) == []


def test_every_page_is_linked_from_the_readme():
    linked = {Path(link).name for link in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == set()


def test_the_architecture_page_has_the_rows_of_the_layers():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows: dict[int, set[str]] = {}
    for number, names in re.findall(r"^\| (\d+) \| ([^|]*) \|", text, re.MULTILINE):
        rows.setdefault(int(number), set()).update(re.findall(r"`([\w/.]+?)(?:/|\.py)`", names))
    expected = {i: {unit.removeprefix("megatron.").replace(".", "/") for unit in row} for i, row in enumerate(ROWS)}
    assert rows == expected


class TestTheChecksThemselves:
    """Each check finds what it looks for."""

    def test_dead_links(self):
        page = ROOT / "docs" / "flags.md"
        text = "[a](flags.md) [b](no_such_page.md) [c](../README.md#no-such-heading) [d](https://pytorch.org)"
        assert dead_links(page, text) == ["no_such_page.md", "../README.md#no-such-heading"]
        assert dead_links(page, "```\n[e](no_such_page.md)\n```") == []

    def test_missing_files(self):
        assert missing_files("`base/errors.py`, `pretrain_gpt.py`, `rrors.py`, `base/no_such_file.py`") == [
            "rrors.py",
            "base/no_such_file.py",
        ]

    def test_anchors(self):
        assert anchors("# Bits: a `b`\n```\n# no\n```\n## Which flags?") == {"bits-a-b", "which-flags"}
