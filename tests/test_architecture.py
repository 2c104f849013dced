"""The direction rule, by reading the source: who may import whom, and where torch and optional packages are named."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Layer of a package or file, by module prefix; the longest prefix that fits counts. A module imports from lower layers
# and its own package. Units of one layer do not import each other, but for SHARED and NEIGHBOURS.
LAYERS = {
    "megatron.core.errors": 0,
    "megatron.core.launch": 0,
    "megatron.core.log": 0,
    "megatron.core.mesh": 0,
    "megatron.core.heartbeat": 0,
    "megatron.core.rendezvous": 0,
    "megatron.config": 0,
    "megatron.core.pipeline_parallel.partition": 0,
    "megatron.core.pipeline_parallel.schedule": 0,
    "megatron.core.pipeline_parallel.passes": 0,
    "megatron.core.pipeline_parallel.offload_pass": 0,
    "megatron.core.pipeline_parallel.schedules": 0,
    "megatron.core.pipeline_parallel.simulate": 0,
    "megatron.core.pipeline_parallel.validate": 0,
    "megatron.core.distributed.buckets": 0,
    "megatron.core.groups": 1,
    "megatron.core.device": 1,
    "megatron.core.timeline": 1,
    "megatron.core.parameter": 1,
    "megatron.core.datasets": 1,
    "megatron.kernels": 1,
    "megatron.planner": 1,
    "megatron.core.comm": 2,
    "megatron.core.dist_checkpointing": 2,
    "megatron.core.tensor_parallel": 3,
    "megatron.core.context_parallel": 3,
    "megatron.core.distributed": 3,
    "megatron.core.memory": 3,
    "megatron.core.pipeline_parallel": 3,
    "megatron.core.transformer": 4,
    "megatron.core.optimizer": 4,
    "megatron.core.models": 5,
    "megatron.core.inference": 6,
    "megatron.training": 7,
}
# Files that the rest of the bottom layer builds on, and the one other pair of neighbours.
SHARED = {
    "megatron.core.errors",
    "megatron.core.log",
    "megatron.core.mesh",
    "megatron.core.heartbeat",
    "megatron.core.rendezvous",
    "megatron.core.pipeline_parallel.partition",
    "megatron.core.pipeline_parallel.schedule",
    "megatron.core.pipeline_parallel.passes",
    "megatron.core.pipeline_parallel.offload_pass",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.simulate",
}
NEIGHBOURS = {("megatron.core.parameter", "megatron.core.groups")}
TORCH_FREE = (
    "megatron.planner",
    "megatron.training.shell",
    "megatron.training.launch_",
    "megatron.training.entry",
    "megatron.training.flag_check",
)  # beside layer 0
DISTRIBUTED = ("megatron.core.groups", "megatron.core.comm", "megatron.core.dist_checkpointing")
# Packages that setup.py does not install: where each may be imported. The kernels' back ends may import any.
OPTIONAL = {
    "wandb": ("megatron.training.writers",),
    "fastapi": ("megatron.core.inference.server",),
    "starlette": ("megatron.core.inference.server",),  # under fastapi, as pydantic is
    "uvicorn": ("megatron.core.inference.connections",),
    "pydantic": ("megatron.core.inference.protocol",),
    "lm_eval": ("megatron.core.inference.harness",),
}
BACKENDS = "megatron.kernels.backends"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted((ROOT / "megatron").rglob("*.py"))}
MODULES = [name for name, path in SOURCES.items() if path.name != "__init__.py"]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """(module or module.name, statement) of every import, at any depth. Relative imports keep their dots."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            found += [(f"{source}.{alias.name}", node) for alias in node.names]
    return found


def unit_of(module: str) -> str | None:
    """The entry of LAYERS that a module, or a name in it, belongs to."""
    fits = [prefix for prefix in LAYERS if module == prefix or module.startswith(prefix + ".")]
    return max(fits, key=len, default=None)


def direction_faults(module: str, tree: ast.AST) -> list[str]:
    mine = unit_of(module)
    if mine is None:
        return [f"{module} has no layer; give it one in LAYERS"]
    faults = []
    for name, _ in imports(tree):
        if name.split(".")[0] in ("tools", "examples", "benchmarks", "tests", "pretrain_gpt", "finetune"):
            faults.append(f"{module} imports {name}, which is above the package")
        if not name.startswith("megatron."):
            continue
        other = unit_of(name)
        if other is None:
            faults.append(f"{module} imports {name}, which has no layer")
        elif other != mine and not _points_down(mine, other):
            faults.append(f"{module} (layer {LAYERS[mine]}) imports {name} (layer {LAYERS[other]})")
    return faults


def _points_down(mine: str, other: str) -> bool:
    if LAYERS[other] != LAYERS[mine]:
        return LAYERS[other] < LAYERS[mine]
    package = mine.rpartition(".")[0]  # a package whose files lie on two layers: pipeline_parallel
    one_package = package in LAYERS and other.startswith(package + ".")
    return other in SHARED or (mine, other) in NEIGHBOURS or one_package


def names_torch(module: str, tree: ast.AST) -> list[str]:
    return [f"{module} imports {name}" for name, _ in imports(tree) if name.split(".")[0] == "torch"]


def names_distributed(module: str, tree: ast.AST) -> list[str]:
    found = [f"{module} imports {name}" for name, _ in imports(tree) if re.match(r"torch\.distributed\b", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and _is_name(node.value, "torch"):
            found.append(f"{module}:{node.lineno} names torch.distributed")
    return found


def deferred_imports(module: str, tree: ast.AST) -> list[str]:
    """Imports of this package that are not run when the module is: inside functions, or under TYPE_CHECKING."""
    late = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)):
            late += [f"{module}:{s.lineno} imports {name} late" for name, s in imports(node) if _in_package(name)]
    return late


def undeclared_imports(module: str, tree: ast.AST, installed: set[str]) -> list[str]:
    """Imports of packages that a plain installation does not bring, outside the place that may."""
    if module.startswith(BACKENDS + "."):
        return []
    faults = []
    for name, _ in imports(tree):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in installed or _in_package(name):
            continue
        if module not in OPTIONAL.get(top, ()):
            faults.append(f"{module} imports {top}, which setup.py does not install")
    return faults


def installed_packages() -> set[str]:
    """Import names of install_requires in setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            wanted = ast.literal_eval(node.value)
            return {re.split(r"[^A-Za-z0-9_.-]", name)[0].replace("-", "_") for name in wanted}
    raise AssertionError("setup.py has no install_requires")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _in_package(name: str) -> bool:
    return name.startswith((".", "megatron"))


def torch_free_modules() -> list[str]:
    names = [m for m in MODULES if (unit := unit_of(m)) is not None and LAYERS[unit] == 0]
    return names + [m for m in MODULES if m.startswith(TORCH_FREE)]


@pytest.mark.parametrize("module", MODULES)
class TestModule:
    def test_imports_point_down(self, module):
        assert direction_faults(module, tree_of(module)) == []

    def test_imports_are_absolute_and_at_the_top(self, module):
        assert deferred_imports(module, tree_of(module)) == []
        assert [name for name, _ in imports(tree_of(module)) if name.startswith(".")] == []

    def test_torch_distributed_is_named_where_communication_lives(self, module):
        if not module.startswith(DISTRIBUTED):
            assert names_distributed(module, tree_of(module)) == []

    def test_third_party_imports_are_declared(self, module):
        assert undeclared_imports(module, tree_of(module), installed_packages()) == []

    def test_no_global_statement(self, module):
        assert [node.lineno for node in ast.walk(tree_of(module)) if isinstance(node, ast.Global)] == []


@pytest.mark.parametrize("module", [m for m, path in SOURCES.items() if path.name == "__init__.py"])
def test_init_files_hold_a_docstring_only(module):
    body = tree_of(module).body
    assert len(body) == 1 and ast.get_docstring(tree_of(module))


@pytest.mark.parametrize("module", torch_free_modules())
def test_the_bottom_layer_names_no_torch(module):
    assert names_torch(module, tree_of(module)) == []


def test_the_bottom_layer_imports_without_torch():
    """In a fresh interpreter, so that what third-party modules import counts as well."""
    lines = [*(f"import {module}" for module in torch_free_modules()), "import sys", "print('torch' in sys.modules)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_no_import_cycles():
    edges = {m: {e for name, _ in imports(tree_of(m)) if (e := _module_in(name)) is not None} for m in MODULES}
    finished: set[str] = set()
    while ready := {m for m in edges if m not in finished and edges[m] <= finished}:
        finished |= ready
    assert set(edges) - finished == set(), "these modules import each other, or a module that does"


def _module_in(name: str) -> str | None:
    """The module that `import name` or `from name's parent import name` loads."""
    return next((m for m in (name, name.rpartition(".")[0]) if m in MODULES), None)


class TestTheTestsThemselves:
    """Each check finds what it looks for."""

    @pytest.mark.parametrize(
        ("module", "source", "faulty"),
        [
            ("megatron.core.groups", "from megatron.core.mesh import Mesh", False),
            ("megatron.core.groups", "from megatron.core.comm.collectives import all_reduce", True),
            ("megatron.core.transformer.mlp", "from megatron.core.optimizer.optimizer import Optimizer", True),
            ("megatron.core.transformer.mlp", "from megatron.core.transformer.norm import Norm", False),
            ("megatron.core.transformer.mlp", "from megatron.core.tensor_parallel import linear", False),
            ("megatron.core.parameter", "from megatron.core.groups import Group", False),
            ("megatron.core.datasets.gpt", "from megatron.core.groups import Group", True),
            ("megatron.core.pipeline_parallel.passes", "from megatron.core.pipeline_parallel import schedule", False),
            ("megatron.core.pipeline_parallel.schedule", "from megatron.config import model", True),
            ("megatron.config.rules", "from megatron.core.errors import ConfigError", False),
            ("megatron.core.errors", "from megatron.config.run import RunConfig", True),
            ("megatron.core.datasets.gpt", "from megatron.kernels.choose import Kernels", True),
            ("megatron.core.pipeline_parallel.schedule", "from megatron.core.pipeline_parallel import engine", True),
            ("megatron.core.pipeline_parallel.engine", "from megatron.core.pipeline_parallel import schedule", False),
            ("megatron.core.models.gpt", "from megatron.training.state import TrainState", True),
            ("megatron.training.loop", "from tools.convert import main", True),
            ("megatron.core.nowhere", "import math", True),
        ],
    )
    def test_direction(self, module, source, faulty):
        assert bool(direction_faults(module, ast.parse(source))) is faulty

    @pytest.mark.parametrize(
        "source",
        [
            "import torch.distributed as dist",
            "from torch import distributed",
            "from torch.distributed import all_reduce",
            "import torch\ntorch.distributed.barrier()",
        ],
    )
    def test_distributed(self, source):
        assert names_distributed("m", ast.parse(source))

    def test_deferred(self):
        assert deferred_imports("m", ast.parse("def f():\n    from megatron.core import log"))
        assert deferred_imports("m", ast.parse("if TYPE_CHECKING:\n    import megatron.core.log"))
        assert not deferred_imports("m", ast.parse("import megatron.core.log"))

    def test_undeclared(self):
        for module, source, faulty in (
            ("megatron.core.models.gpt", "import transformer_engine.pytorch", True),
            ("megatron.kernels.ops.norm", "import triton", True),
            ("megatron.kernels.backends.te", "import transformer_engine", False),
            ("megatron.training.writers", "import wandb", False),
            ("megatron.training.loop", "import wandb", True),
            ("megatron.training.loop", "import torch, math, megatron.core.log", False),
        ):
            assert bool(undeclared_imports(module, ast.parse(source), installed_packages())) is faulty

    def test_every_layer_but_the_future_ones_exists(self):
        """A renamed package would fall out of LAYERS unseen: what does not exist yet is named here."""
        missing = {unit for unit in LAYERS if not any(unit_of(module) == unit for module in MODULES)}
        future = {"megatron.planner", "megatron.core.context_parallel", "megatron.core.memory"}
        future |= {"megatron.core.inference"}
        future |= {f"megatron.core.pipeline_parallel.{name}" for name in ("partition", "passes")}
        assert missing <= future, sorted(itertools.chain(missing - future))
