"""The documentation's links lead somewhere, its Python code type-checks, and the files, flags and names in it exist."""

import importlib
import re
import textwrap
from pathlib import Path

import pytest

from tests.test_architecture import ROWS
from tests.unit.project_names import FOLDERS, ROOT, project_names, sources

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
# A path of source code, or one that begins in the project's root; also in blocks of code and inside commands.
PATH = re.compile(
    rf"(?<![\w./<-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w|(?<=`)[\w./-]+\.(?:py|cpp|csv|sbatch)(?=`))(?!\w*[*<])"
)
MODULE = re.compile(r"-m ((?:megatron|tests|benchmarks)\.[\w.]*\w)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?<!-)(?![\w-])")
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"\.(?:py|sh|jinja|html|png|pt|jsonl)$")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")

# Names of other projects' programs, libraries and files, which occur in no source file of this one.
LIBRARIES = ("torch", "builtins", "os")
OTHERS = {
    *("FusedAdam", "FusedLayerNorm", "MixedFusedRMSNorm", "amp_C", "multi_tensor_l2norm", "multi_tensor_scale"),
    *("fused_weight_gradient_mlp_cuda", "cu_seqlens", "batched_mm", "purge_step", "pretrain_mcore_qwen"),
    *(
        "weight_scale",
        "weight_scale_inv",
        "dp_reshardable",
        "dp_zero_gather_scatter",
        "fully_sharded_model_space",
        "compute_crc32",
    ),
    *("flock", "lockd", "nolock"),  # of file systems
}
OTHER_PATHS = {"examples/llama/train_llama3_8b.sh"}
OTHER_FLAGS = {
    "--gpus-per-task",
    "--gradient-accumulation-fusion",
    "--map-by",
    "--model_args",
    "--no-build-isolation",
    "--no-kill",
    "--time",
}


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
    """Paths and modules that do not exist; a page may leave out the folders that lead to a file, and name a folder."""
    paths = [path.relative_to(ROOT).as_posix() for path in sources()]
    folders = {path.name for path in sources() if path.is_dir()}
    named = [*PATH.findall(text), *(module.replace(".", "/") for module in MODULE.findall(text))]
    named += [
        code.rstrip("/")
        for code in CODE.findall(prose(text))
        if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*/?", code) and "/" in code and code.split("/")[0] in folders
    ]
    return [
        path
        for path in dict.fromkeys(named)
        if path not in OTHER_PATHS and not any(f"/{known}".endswith((f"/{path}", f"/{path}.py")) for known in paths)
    ]


def unknown_flags(text: str) -> list[str]:
    """Flags, also in blocks of code, that no program of ours and no table of ours knows."""
    return sorted(set(FLAG.findall(text)) - project_names().flags - OTHER_FLAGS)


def _in_library(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True
    return False


def _is_known(name: str) -> bool:
    names, parts = project_names(), name.split(".")
    if parts[0] in LIBRARIES and len(parts) > 1:
        return _in_library(name)
    if len(parts) > 1 and parts[0][0].isupper() and not parts[0].isupper():  # an attribute of a class
        return names.has_member(parts[-2], parts[-1])
    return all(part in names.words or part in OTHERS or part.isupper() for part in parts)


def unknown_names(text: str) -> list[str]:
    """Identifiers and dotted names in backticks, with or without arguments, that do not exist."""
    codes = (re.sub(r"\(.*\)$|=\S*$", "", code) for code in CODE.findall(prose(text)))
    found = (code for code in codes if IDENTIFIER.fullmatch(code) and not FILE.search(code))
    return [name for name in dict.fromkeys(found) if not _is_known(name)]


def blocks(text: str) -> list[str]:
    return [textwrap.dedent(block) for block in BLOCK.findall(text)]


def is_excerpt(block: str) -> bool:
    """Whether its first line names the file that it is copied from."""
    return re.match(r"# megatron/\S+\.py\n", block) is not None


def stale_lines(excerpt: str) -> list[str]:
    """The parts of an excerpt, between lines of dots, that do not stand in its file in this order."""
    name, _, code = excerpt.partition("\n")
    rest = "\n".join(line.strip() for line in (ROOT / name.removeprefix("# ")).read_text(encoding="utf-8").splitlines())
    stale = []
    for part in re.split(r"^\s*\.\.\.\n", code, flags=re.MULTILINE):
        lines = "\n".join(line.strip() for line in part.strip().splitlines())
        if lines in rest:
            rest = rest.partition(lines)[2]
        else:
            stale.append(lines)
    return stale


def type_errors(programs: dict[str, str], folder: Path) -> str:
    """mypy's report of these programs, by name; empty if they are right."""
    api = pytest.importorskip("mypy.api")
    paths = [folder / f"{name}.py" for name in programs]
    for path, program in zip(paths, programs.values(), strict=True):
        path.write_text(program, encoding="utf-8")
    settings = (
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        "--no-error-summary",
    )
    output, errors, _ = api.run([*settings, *map(str, paths)])
    return str(output + errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
class TestPage:
    def test_links(self, page):
        assert dead_links(page, page.read_text(encoding="utf-8")) == []

    def test_named_files(self, page):
        assert missing_files(page.read_text(encoding="utf-8")) == []

    def test_flags(self, page):
        assert unknown_flags(page.read_text(encoding="utf-8")) == []

    def test_names(self, page):
        assert unknown_names(page.read_text(encoding="utf-8")) == []

    def test_excerpts(self, page):
        excerpts = filter(is_excerpt, blocks(page.read_text(encoding="utf-8")))
        assert [part for excerpt in excerpts for part in stale_lines(excerpt)] == []


def test_the_python_code_of_all_pages_type_checks(tmp_path):
    programs = {
        f"{page.stem}_{number}": block
        for page in PAGES
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8")))
        if not is_excerpt(block)
    }
    assert programs and type_errors(programs, tmp_path) == ""


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
        known = "`base/errors.py`, `pretrain_gpt.py`, `config/rules/`, `core/comm`, `SAVE/heartbeat`\n"
        commands = "```\npython tools/plan.py memory\npython -m tests.fuzz.layouts\n```\n"
        assert missing_files(known + commands) == []
        assert missing_files("`rrors.py`, `base/no_such_file.py`, `config/ruels/`") == [
            "rrors.py",
            "base/no_such_file.py",
            "config/ruels",
        ]
        assert missing_files("```\npython tools/plans.py\n```\n`python -m tests.fuzz.no_such`") == [
            "tools/plans.py",
            "tests/fuzz/no_such",
        ]

    def test_unknown_flags(self):
        text = (
            "`--tensor-model-parallel-size 2`, `--no-masked-softmax-fusion`\n```\ntools/plan.py --no-flag-of-ours\n```"
        )
        assert unknown_flags(text) == ["--no-flag-of-ours"]

    def test_unknown_names(self):
        assert unknown_names("`Groups.along(axis)`, `decoder_spec`, `needs=`, `torch.addmm`, `ParamSpec`, `a b`") == []
        stale = "`Groups.across(axis)`, `no_such_name`, `torch.no_such`, `ParamSpecs`, `pool.no_such()`"
        assert unknown_names(stale) == ["Groups.across", "no_such_name", "torch.no_such", "ParamSpecs", "pool.no_such"]

    def test_stale_lines(self):
        head = "# megatron/spec/parameter.py\n"
        assert is_excerpt(head) and not is_excerpt("# megatron\n")
        assert stale_lines(f"{head}class Shard(NamedTuple):\n    ...\n    axis: str\n    dim: int\n") == []
        assert stale_lines(f"{head}axis: str\n...\nclass Shard(NamedTuple):\n") == ["class Shard(NamedTuple):"]
        assert stale_lines(f"{head}axes: str\n") == ["axes: str"]

    def test_type_errors(self, tmp_path):
        wrong = (
            'from megatron.spec.parameter import Init, ParamSpec\n\nParamSpec((2,), Init("normal", 1.0), axis="etp")\n'
        )
        assert 'Unexpected keyword argument "axis"' in type_errors({"wrong": wrong}, tmp_path)
        assert 'Name "q" is not defined' in type_errors({"fragment": "print(q)\n"}, tmp_path)

    def test_anchors(self):
        assert anchors("# Bits: a `b`\n```\n# no\n```\n## Which flags?") == {"bits-a-b", "which-flags"}
