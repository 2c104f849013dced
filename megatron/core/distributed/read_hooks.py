"""Calls hooks whenever a module's parameter is accessed.

Reading `module.weight` looks the parameter up in the module's table of parameters, and this table calls the hooks. So
hooks see every read of a tied weight, and of a weight that another module's forward reads. `named_parameters`, with
which set-up and checkpoints find parameters without reading their values, calls no hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def register_read_hook(model: nn.Module, hook: Callable[[nn.Parameter], None]) -> None:
    """From now on calls `hook(parameter)` whenever an attribute of a module of `model` yields a parameter.

    Several hooks may be registered; they are called in order of registration.
    """
    for module in model.modules():
        if not module._parameters:
            continue
        if not isinstance(module._parameters, _ParameterTable):
            module._parameters = _ParameterTable(module._parameters)
        module._parameters.hooks.append(hook)


class _ParameterTable(dict[str, Any]):
    """A module's parameters by name."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.hooks: list[Callable[[nn.Parameter], None]] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            for hook in self.hooks:
                hook(parameter)
        return parameter
