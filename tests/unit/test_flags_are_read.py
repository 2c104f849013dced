"""No silent flag: the list of flags is frozen, and every one of them is read by the program.

After adding or removing a flag on purpose, update both generated files and show them in the change:
    python -m tests.unit.test_flags_are_read > tests/unit/flags.txt
    python tools/flags_table.py > docs/flags.md
"""

import ast
import functools
import inspect
import runpy
import textwrap
from pathlib import Path

import pytest

from megatron.command_line.flag_parser import build_parser
from megatron.config.run import PARTS, flag_fields

ROOT = Path(__file__).parents[2]
CONFIG_CLASSES = {cls.__name__: part for part, cls in PARTS.items()}
# These judge or print every field; reading one there changes nothing about the run.
REPORTERS = ("megatron/config/", "megatron/command_line/flag_parser.py", "tools/flags_table.py")
# The files of the configuration that make something of it.
MAKERS = (
    "megatron/config/mesh.py",
    "megatron/config/data_parallel.py",
    "megatron/config/pipeline.py",
    "megatron/config/optimizer_offload.py",
    "megatron/config/context_parallel.py",
    "megatron/config/batch_schedule.py",
    "megatron/config/communicators.py",
    "megatron/config/elastic.py",
    "megatron/config/settings.py",
)


def test_the_list_of_flags_is_frozen():
    frozen = Path(__file__).with_name("flags.txt").read_text().splitlines()
    assert current_flags() == frozen, "see the head of this file for how to update flags.txt"


def test_the_flags_page_is_up_to_date():
    table = runpy.run_path(str(ROOT / "tools" / "flags_table.py"))["table"]
    assert (ROOT / "docs" / "flags.md").read_text() == table(), "run: python tools/flags_table.py > docs/flags.md"


@pytest.mark.parametrize("name", flag_fields())
def test_a_flag_is_read(name):
    part, _ = flag_fields()[name]
    reads = fields_read()
    assert name in reads | read_by_properties(part, reads), f"no code outside megatron/config reads {part}.{name}"


def test_the_search_sees_through_names_and_not_past_them():
    """The search itself: a config by annotation, by the part's name, behind self, and things that are no config."""
    read = functools.partial(attributes_of_configs, parts=set(PARTS))
    assert read("def f(c: TrainConfig):\n    return c.seed") == {"seed"}
    assert read("def f(run):\n    return run.checkpoint.save, run.model") == {"save"}
    assert read("class A:\n    def f(self):\n        return self._config.lr, self.seed") == {"lr"}
    assert read("optimizer = run.optimizer\nx = optimizer.clip_grad") == {"clip_grad"}
    assert read("settings: EvalConfig | None = g()\nsettings.eval_iters") == {"eval_iters"}
    assert read("torch.load(p); text.split(); state.seed; x.bf16") == set()
    assert read("from x import checkpoint\ncheckpoint.save(y)") == set(), "a module is no configuration"
    assert read("import logging\nlogging.log_interval\nrun.logging.log_progress") == {"log_progress"}
    assert read("config.fp16 = True") == set(), "an assignment is no reading"


def current_flags() -> list[str]:
    return sorted(build_parser("").spellings)


@functools.cache
def fields_read() -> frozenset[str]:
    """Names read as attributes of a configuration anywhere in the program."""
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *ROOT.glob("*.py")]
    names: set[str] = set()
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        if path in MAKERS or not path.startswith(REPORTERS):
            names |= attributes_of_configs(file.read_text(encoding="utf-8"), set(PARTS))
    return frozenset(names)


def attributes_of_configs(source: str, parts: set[str]) -> set[str]:
    """Attributes read on something that is a configuration by its name (`config`, `run.train`, `self._model`,
    `train_config`) or by its annotation in this source."""
    tree = ast.parse(source)
    holders = parts | {"config", "cfg"} | _annotated(tree)
    modules = {
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    read = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        if isinstance(node.value, ast.Name):
            holder = "" if node.value.id in modules else node.value.id.strip("_")
        else:
            holder = getattr(node.value, "attr", "").strip("_")
        if holder in holders or holder.endswith("_config"):
            read.add(node.attr)
    return read


def _annotated(tree: ast.AST) -> set[str]:
    """Parameters, variables and fields whose annotation names a configuration class."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation and _names_a_config(node.annotation):
            names.add(node.arg.strip("_"))
        elif isinstance(node, ast.AnnAssign) and _names_a_config(node.annotation):
            target = node.target
            names.add((target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")).strip("_"))
    return names


def _names_a_config(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id in CONFIG_CLASSES for node in ast.walk(annotation))


def read_by_properties(part: str, reads: frozenset[str]) -> set[str]:
    """Fields that a property or method of the configuration class, or of one that it inherits, reads, where the program
    reads that one."""
    found: set[str] = set()
    uses: dict[str, set[str]] = {}
    members = {name: member for cls in reversed(PARTS[part].__mro__) for name, member in vars(cls).items()}
    for name, member in members.items():
        body = member.fget if isinstance(member, property) else member
        if inspect.isfunction(body) and not name.startswith("__"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(body)))
            uses[name] = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    pending = [name for name in uses if name in reads]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += uses.get(name, ())
    return found


if __name__ == "__main__":
    print("\n".join(current_flags()))
