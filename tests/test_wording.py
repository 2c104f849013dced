"""Holds the English of docstrings, comments and names to standard usage, by counting words per 10,000.

`python -m tests.test_wording` prints the counts; `python -m tests.test_wording what` lists every line with the word,
and `python -m tests.test_wording found` every variable and argument with the word in its name.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("megatron", "tools", "benchmarks")
# Upper limits of words per 10,000, and the lower limit of "per". "What" clauses used as nouns, "beside" for "overlapped
# with" or "next to" and "far" for "offloaded" are hard to understand; "per" is the standard word for a rate.
AT_MOST = {"what": 20.0, "beside": 1.0, "far": 1.0}
AT_LEAST = {"per": 15.0}
# A variable is named after its content. These words say only where it comes from; "found" or "each" fits anything.
NAME_PLACES = ("megatron", "tools")
NOT_IN_NAMES = frozenset(
    re.findall(
        r"\w+", "found each some again here there others more rest which known asked given made kept way one own"
    )
)
NAMES_AT_MOST = 38.5  # names with such a word, per 10,000 variables and arguments
# A rate with an article: "bytes a token", "once a step". Both words are listed, because "makes a step" is no rate.
_COUNTED = (
    "bytes|bits|gib|gb|mib|mb|kib|kb|flops|tflops|tokens|samples|sequences|documents|microbatches|batches|steps|layers|values"
    "|numbers|tensors|buckets|parameters|elements|seconds|minutes|hours|times|twice|thrice|requests|lines|files|blocks|rows"
    "|words|messages|collectives|one|two|three|four|five|six|seven|eight|[0-9]+"
)
_UNIT = (
    "byte|token|sample|sequence|document|microbatch|batch|step|iteration|layer|value|tensor|bucket|parameter|weight|element"
    "|second|minute|hour|day|call|request|line|file|block|row|word|record|message|rank|process|host|gpu|device|stage|chunk"
    "|head|family|group|microstep|epoch|direction|pass|link|slot|kernel|node|machine"
)
RATE = re.compile(rf"\b(?:(?:{_COUNTED}) an? (?:{_UNIT})|once an? (?:step|second|token|layer|epoch))\b", re.IGNORECASE)
# "So far" and "as far as" are ordinary English.
_IDIOM = re.compile(r"\b(?:so far|as far as)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


@dataclass(frozen=True, slots=True)
class Text:
    """One line of a docstring or a comment."""

    path: Path
    line: int
    words: str
    opens_docstring: bool = False


def _docstrings(path: Path, source: str) -> list[Text]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines = first.value.value.split("\n")
            found += [Text(path, first.lineno + at, line, at == 0) for at, line in enumerate(lines)]
    return found


def texts(path: Path) -> list[Text]:
    """The lines of the docstrings and comments of a Python file, in order."""
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [Text(path, token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return sorted(_docstrings(path, source) + comments, key=lambda text: text.line)


@functools.cache
def all_texts() -> list[Text]:
    """The texts of megatron/, tools/, benchmarks/ and the scripts of the root."""
    files = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))] + sorted(ROOT.glob("*.py"))
    return [text for path in files for text in texts(path)]


def words_of(text: Text) -> list[str]:
    return [word.lower() for word in _WORD.findall(_IDIOM.sub("", text.words))]


def frequencies(found: list[Text]) -> dict[str, float]:
    """How often each limited word occurs per 10,000 words."""
    counts = Counter(word for text in found for word in words_of(text))
    return {word: 1e4 * counts[word] / counts.total() for word in AT_MOST | AT_LEAST}


@dataclass(frozen=True, slots=True)
class BoundName:
    """A variable or an argument, where it is bound."""

    path: Path
    line: int
    name: str

    @property
    def parts(self) -> frozenset[str]:
        """The words of the name, in lower case."""
        return frozenset(self.name.lower().split("_"))


def bound_names(path: Path) -> list[BoundName]:
    """The variables and arguments that a Python file binds, with repeats."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [
        BoundName(path, node.lineno, node.id if isinstance(node, ast.Name) else node.arg)
        for node in nodes
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]


@functools.cache
def all_names() -> list[BoundName]:
    """The names that megatron/ and tools/ bind."""
    return [
        name for place in NAME_PLACES for path in sorted((ROOT / place).rglob("*.py")) for name in bound_names(path)
    ]


def unclear(names: list[BoundName]) -> list[BoundName]:
    return [name for name in names if name.parts & NOT_IN_NAMES]


def name_frequency(names: list[BoundName]) -> float:
    """How often the words of NOT_IN_NAMES occur in names, per 10,000 names."""
    return 1e4 * sum(len(name.parts & NOT_IN_NAMES) for name in names) / len(names)


def _place(text: Text) -> str:
    return f"{text.path.relative_to(ROOT)}:{text.line}"


def uses(found: list[Text], word: str) -> list[Text]:
    return [text for text in found if word in words_of(text)]


def worst(found: list[Text], word: str, files: int = 10) -> str:
    """The files that use a word most often, with the lines."""
    lines: dict[Path, list[int]] = {}
    for text in uses(found, word):
        lines.setdefault(text.path, []).append(text.line)
    most = sorted(lines.items(), key=lambda item: -len(item[1]))[:files]
    return "\n".join(f"  {path.relative_to(ROOT)}: {', '.join(map(str, where))}" for path, where in most)


def rates_with_article(found: list[Text]) -> list[Text]:
    return [text for text in found if RATE.search(text.words)]


def fragments(found: list[Text]) -> list[Text]:
    """Docstrings that begin with "Of": they continue the name of the function instead of being a sentence."""
    return [text for text in found if text.opens_docstring and text.words.startswith("Of ")]


def test_words_are_not_overused() -> None:
    found = all_texts()
    for word, value in frequencies(found).items():
        assert value <= AT_MOST.get(word, value), (
            f'"{word}": {value:.1f} per 10,000 words; most in\n{worst(found, word)}'
        )
        assert value >= AT_LEAST.get(word, value), f'"{word}": {value:.1f} per 10,000 words'


def test_no_docstring_is_a_fragment() -> None:
    assert not [_place(text) for text in fragments(all_texts())]


def test_rates_say_per() -> None:
    assert not [f"{_place(text)} {text.words.strip()}" for text in rates_with_article(all_texts())]


def test_names_say_what_they_hold() -> None:
    value = name_frequency(all_names())
    folders = Counter(str(name.path.parent.relative_to(ROOT)) for name in unclear(all_names()))
    assert value <= NAMES_AT_MOST, (
        f"{value:.1f} of 10,000 names have a part like found, each or asked; most in {folders.most_common(5)}; "
        "python -m tests.test_wording found lists those with a word"
    )


def test_names_are_counted_by_their_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("def f(found_rows, rows=1):\n    Given = [each for each in rows]\n    return Given, bones\n")
    names = bound_names(path)
    assert sorted(name.name for name in names) == ["Given", "each", "found_rows", "rows"]
    assert sorted(name.line for name in unclear(names)) == [1, 2, 2]
    assert name_frequency(names) == 1e4 * 3 / 4


def test_the_counts_find_what_they_should(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """Of what is far.\n\n    Two bytes a token.\n    """\n    return 1  # beside it\n')
    found = texts(path)
    assert [text.line for text in found] == [2, 3, 4, 5, 6]
    assert [text.line for text in fragments(found)] == [2]
    assert [text.line for text in rates_with_article(found)] == [4]
    assert [text.line for text in uses(found, "beside")] == [6]
    assert frequencies(found) == {"what": 1e4 / 10, "beside": 1e4 / 10, "far": 1e4 / 10, "per": 0.0}


def _main(words: list[str]) -> None:
    found = all_texts()
    if not words:
        print(f"{sum(len(words_of(text)) for text in found)} words")
        for word, value in frequencies(found).items():
            limit = f"at most {AT_MOST[word]:g}" if word in AT_MOST else f"at least {AT_LEAST[word]:g}"
            print(f'"{word}": {value:.1f} per 10,000 words ({limit})')
        print(
            f'{len(fragments(found))} docstrings begin with "Of", {len(rates_with_article(found))} rates say "a" for "per"'
        )
        print(f"{name_frequency(all_names()):.1f} of 10,000 names have an unclear part (at most {NAMES_AT_MOST:g})")
    for word in words:
        for name in (name for name in all_names() if word in name.parts):
            print(f"{name.path.relative_to(ROOT)}:{name.line}: {name.name}")
        for text in uses(found, word):
            print(f"{_place(text)}: {text.words.strip()}")


if __name__ == "__main__":
    _main(sys.argv[1:])
