"""Lets somebody know whenever a module's parameter is read.

By use, not by module: reading `module.weight` goes through the module's table of parameters, so the table is where a wait
or a gather belongs. A tied weight is noticed at its first reader, a weight that another module's forward borrows is noticed
there, and `named_parameters`, with which set-up and checkpoints find parameters without reading values, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def watch_reads(model: nn.Module, before_read: Callable[[nn.Parameter], None]) -> None:
    """From now on `before_read(parameter)` is called whenever an attribute of a module of `model` yields a parameter.

    Several may watch; they are called in the order in which they began to.
    """
    for module in model.modules():
        if not module._parameters:
            continue
        if not isinstance(module._parameters, _Table):
            module._parameters = _Table(module._parameters)
        module._parameters.watchers.append(before_read)


class _Table(dict[str, Any]):
    """A module's parameters by name."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.watchers: list[Callable[[nn.Parameter], None]] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            for before_read in self.watchers:
                before_read(parameter)
        return parameter
