"""Checks the direction rule by reading the source: the allowed imports, and where torch and optional packages are
named.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Packages and files from the bottom up. A module imports from rows below its own and from its own package; entries of
# one row do not import each other.
ROWS = (
    ("megatron.base",),
    ("megatron.schedule",),
    ("megatron.config",),
    ("megatron.spec",),
    ("megatron.planner", "megatron.command_line", "megatron.tooling.launch_script"),
    ("megatron.kernels", "megatron.core.device", "megatron.core.groups"),
    ("megatron.core.timeline", "megatron.core.parameter", "megatron.core.datasets"),
    ("megatron.core.streams",),
    ("megatron.core.comm",),
    ("megatron.core.offload",),
    (
        "megatron.core.tensor_parallel",
        "megatron.core.context_parallel",
        "megatron.core.expert_parallel",
        "megatron.core.distributed",
        "megatron.core.recompute",
        "megatron.core.pipeline_parallel",
        "megatron.core.dist_checkpointing",
    ),
    ("megatron.core.transformer", "megatron.core.optimizer"),
    ("megatron.core.models",),
    ("megatron.core.inference.engine",),
    ("megatron.core.inference",),
    ("megatron.core.inference.server",),
    ("megatron.training",),
    ("megatron.conversion", "megatron.tooling", "megatron.rl"),
)
LAYERS = {unit: layer for layer, row in enumerate(ROWS) for unit in row}
TORCH_FREE = tuple(unit for row in ROWS[:5] for unit in row)
DISTRIBUTED = ("megatron.core.groups", "megatron.core.comm", "megatron.core.dist_checkpointing")
# Where CUDA streams are made, entered and waited for. The timeline records events of its own.
STREAMS = ("megatron.core.streams", "megatron.core.timeline")
# Packages that setup.py does not install, with the modules that may import each. The kernels' backends may import any.
OPTIONAL = {
    "wandb": ("megatron.training.logging.writers",),
    "pyarrow": ("megatron.rl.prompt_rows",),
    "fastapi": ("megatron.core.inference.server.app",),
    "starlette": ("megatron.core.inference.server.app",),  # a dependency of fastapi, like pydantic
    "uvicorn": ("megatron.core.inference.server.connections",),
    "pydantic": ("megatron.core.inference.server.protocol",),
    "lm_eval": ("megatron.core.inference.harness",),
}
BACKENDS = "megatron.kernels.backends"
IMPORTED_AS = {"pyyaml": "yaml"}  # packages that are imported under another name than they are installed by


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted((ROOT / "megatron").rglob("*.py"))}
MODULES = [name for name, path in SOURCES.items() if path.name != "__init__.py"]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """Returns (module or module.name, statement) of every import, at any depth. Relative imports keep their dots."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            found += [(f"{source}.{alias.name}", node) for alias in node.names]
    return found


def unit_of(module: str) -> str | None:
    """Returns the entry of LAYERS to which a module, or a name in it, belongs."""
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
        elif other != mine and LAYERS[other] >= LAYERS[mine]:
            faults.append(f"{module} (layer {LAYERS[mine]}) imports {name} (layer {LAYERS[other]})")
    return faults


def names_torch(module: str, tree: ast.AST) -> list[str]:
    return [f"{module} imports {name}" for name, _ in imports(tree) if name.split(".")[0] == "torch"]


def names_distributed(module: str, tree: ast.AST) -> list[str]:
    found = [f"{module} imports {name}" for name, _ in imports(tree) if re.match(r"torch\.distributed\b", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and _is_name(node.value, "torch"):
            found.append(f"{module}:{node.lineno} names torch.distributed")
    return found


def names_cuda_streams(module: str, tree: ast.AST) -> list[str]:
    names = ("Stream", "Event", "stream", "current_stream")
    return [
        f"{module}:{node.lineno} names torch.cuda.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "torch.cuda"
    ]


def deferred_imports(module: str, tree: ast.AST) -> list[str]:
    """Returns imports of this package that do not run with the module: inside functions, or under TYPE_CHECKING."""
    late = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)):
            late += [f"{module}:{s.lineno} imports {name} late" for name, s in imports(node) if _in_package(name)]
    return late


def undeclared_imports(module: str, tree: ast.AST, installed: set[str]) -> list[str]:
    """Returns imports of packages that a plain installation lacks, outside the modules that may import them."""
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
    """Returns the import names of install_requires in setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            wanted = ast.literal_eval(node.value)
            names = {re.split(r"[^A-Za-z0-9_.-]", name)[0].replace("-", "_") for name in wanted}
            return {IMPORTED_AS.get(name, name) for name in names}
    raise AssertionError("setup.py has no install_requires")


def public_types(tree: ast.Module) -> list[str]:
    """Returns the public classes and type aliases of a module. Names of assignments in capitals are constants."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            assigned = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found += [name for name in assigned if name[0].isupper() and not name.isupper()]
    return [name for name in found if not name.startswith("_")]


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _in_package(name: str) -> bool:
    return name.startswith((".", "megatron"))


TORCH_FREE_MODULES = [module for module in MODULES if unit_of(module) in TORCH_FREE]


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

    def test_cuda_streams_are_named_where_asynchronous_work_lives(self, module):
        if not module.startswith(STREAMS):
            assert names_cuda_streams(module, tree_of(module)) == []

    def test_third_party_imports_are_declared(self, module):
        assert undeclared_imports(module, tree_of(module), installed_packages()) == []

    def test_no_global_statement(self, module):
        assert [node.lineno for node in ast.walk(tree_of(module)) if isinstance(node, ast.Global)] == []


@pytest.mark.parametrize("module", [m for m, path in SOURCES.items() if path.name == "__init__.py"])
def test_init_files_hold_a_docstring_only(module):
    body = tree_of(module).body
    assert len(body) == 1 and ast.get_docstring(tree_of(module))


@pytest.mark.parametrize("module", TORCH_FREE_MODULES)
def test_the_bottom_rows_name_no_torch(module):
    assert names_torch(module, tree_of(module)) == []


def test_the_bottom_rows_import_without_torch():
    """Uses a new interpreter, so that imports of third-party modules count as well."""
    lines = [*(f"import {module}" for module in TORCH_FREE_MODULES), "import sys", "print('torch' in sys.modules)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_no_import_cycles():
    edges = {m: {e for name, _ in imports(tree_of(m)) if (e := _module_in(name)) is not None} for m in MODULES}
    finished: set[str] = set()
    while ready := {m for m in edges if m not in finished and edges[m] <= finished}:
        finished |= ready
    assert set(edges) - finished == set(), "these modules import each other, or a module that does"


def test_no_two_public_types_have_one_name():
    """A reader who meets a name in two files takes it for one thing."""
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for name in public_types(tree_of(module)):
            places.setdefault(name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def _module_in(name: str) -> str | None:
    """Returns the module that `import name` or `from name's parent import name` loads."""
    return next((m for m in (name, name.rpartition(".")[0]) if m in MODULES), None)


class TestTheTestsThemselves:
    """Each check finds the fault that it looks for."""

    @pytest.mark.parametrize(
        ("module", "source", "faulty"),
        [
            ("megatron.core.groups", "from megatron.base.mesh import Mesh", False),
            ("megatron.core.groups", "from megatron.core.comm.collectives import all_reduce", True),
            ("megatron.core.transformer.mlp", "from megatron.core.optimizer.optimizer import Optimizer", True),
            ("megatron.core.transformer.mlp", "from megatron.core.transformer.norm import Norm", False),
            ("megatron.core.transformer.mlp", "from megatron.core.tensor_parallel import linear", False),
            ("megatron.core.parameter", "from megatron.core.groups import Group", False),
            ("megatron.core.datasets.gpt_dataset", "from megatron.core.comm.collectives import barrier", True),
            ("megatron.schedule.passes", "from megatron.schedule import schedule", False),
            ("megatron.schedule.schedule", "from megatron.config import model", True),
            ("megatron.config.rules.check", "from megatron.base.errors import ConfigError", False),
            ("megatron.base.errors", "from megatron.config.run import RunConfig", True),
            ("megatron.schedule.schedule", "from megatron.core.pipeline_parallel import engine", True),
            ("megatron.core.pipeline_parallel.engine", "from megatron.schedule import schedule", False),
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

    def test_cuda_streams(self):
        assert names_cuda_streams("m", ast.parse("side = torch.cuda.Stream(device)"))
        assert names_cuda_streams("m", ast.parse("with torch.cuda.stream(side):\n    pass"))
        assert not names_cuda_streams("m", ast.parse("torch.cuda.synchronize()\nstreams.stream('tp')"))

    def test_deferred(self):
        assert deferred_imports("m", ast.parse("def f():\n    from megatron.core import log"))
        assert deferred_imports("m", ast.parse("if TYPE_CHECKING:\n    import megatron.base.log"))
        assert not deferred_imports("m", ast.parse("import megatron.base.log"))

    def test_undeclared(self):
        for module, source, faulty in (
            ("megatron.core.models.gpt", "import transformer_engine.pytorch", True),
            ("megatron.kernels.ops.norm", "import triton", True),
            ("megatron.kernels.backends.te", "import transformer_engine", False),
            ("megatron.training.logging.writers", "import wandb", False),
            ("megatron.training.loop", "import wandb", True),
            ("megatron.training.loop", "import torch, math, megatron.base.log", False),
        ):
            assert bool(undeclared_imports(module, ast.parse(source), installed_packages())) is faulty

    def test_public_types(self):
        lines = (
            "class MLP: ...",
            "class _Row: ...",
            "Pair = tuple[int, int]",
            "LIMIT = at = 1",
            "def f():\n    class Inner: ...",
        )
        assert public_types(ast.parse("\n".join(lines))) == ["MLP", "Pair"]

    def test_every_unit_exists(self):
        """A renamed package would otherwise be missing from LAYERS unnoticed."""
        assert [unit for unit in LAYERS if not any(unit_of(module) == unit for module in MODULES)] == []
