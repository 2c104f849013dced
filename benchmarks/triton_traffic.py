"""The bytes that a launch of a Triton kernel moves, read from the kernel's source and from the tensors of the launch.

A kernel reads the tensors whose pointers it gives to tl.load, and writes those that it gives to tl.store, on the
branches that its constants choose. Each element of such a tensor counts once per way: a row that all programs read
comes from the cache after the first, and a table of which a kernel touches some rows counts in full.
`benchmarks.triton_kernels bytes` counts addresses instead, in Triton's interpreter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

Names = set[str]


def traffic(kernel: Any, arguments: Mapping[str, Any]) -> tuple[Names, Names]:
    """Returns the names of the tensors that a kernel (a function under @triton.jit) reads, and of those that it writes.

    arguments: of a launch, by name.
    """
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    found = _Traffic(kernel, {name: {name} for name in tensors}, arguments)
    return found.read, found.written


class _Traffic(ast.NodeVisitor):
    """Goes through a kernel in order. `_from` knows of each variable which arguments it is computed from by
    arithmetic."""

    def __init__(self, kernel: Any, sources: Mapping[str, Names], constants: Mapping[str, Any]) -> None:
        self.read: Names = set()
        self.written: Names = set()
        self._from, self._constants = dict(sources), constants
        self._globals = kernel.fn.__globals__
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
        assert isinstance(function, ast.FunctionDef)
        for statement in function.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        """A constant condition chooses a branch; of another one both are taken."""
        try:
            chosen = eval(compile(ast.Expression(node.test), "", "eval"), {}, dict(self._constants))
        except (NameError, TypeError):
            chosen = None
        self.visit(node.test)
        for statement in (*(node.body if chosen in (None, True) else ()), *(() if chosen is True else node.orelse)):
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A variable points where the arguments in its expression do; several are assigned one expression each."""
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple):
                each = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(target.elts)
                pairs = list(zip(target.elts, each, strict=True))
            values = [(name, self._sources(value)) for name, value in pairs]
            for name, sources in values:
                assert isinstance(name, ast.Name)
                self._from[name.id] = sources

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """As x = x + value."""
        self.visit(node.value)
        assert isinstance(node.target, ast.Name)
        self._from[node.target.id] = self._sources(node.target) | self._sources(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """Notes loads and stores, and goes through other kernels that are called."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store"):
            way = self.read if node.func.attr == "load" else self.written
            way |= self._sources(node.args[0])
        elif isinstance(node.func, ast.Name) and hasattr(self._globals.get(node.func.id), "fn"):
            inner = self._globals[node.func.id]
            given = dict(zip(inspect.signature(inner.fn).parameters, node.args, strict=False))
            named = {k: v for k, v in self._constants.items() if k in given}
            within = _Traffic(inner, {name: self._sources(value) for name, value in given.items()}, named)
            self.read |= within.read
            self.written |= within.written

    def _sources(self, node: ast.AST) -> Names:
        """The arguments that an expression points to. What a kernel has loaded, or another one returns, points
        nowhere."""
        if isinstance(node, ast.Name):
            return self._from.get(node.id, set())
        if isinstance(node, ast.Call):
            return set()
        return _union(self._sources(child) for child in ast.iter_child_nodes(node))


def _union(sets: Iterable[Names]) -> Names:
    return set().union(*sets)
