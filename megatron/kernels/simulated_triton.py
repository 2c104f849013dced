"""Triton as a dry run sees it: kernels are launched, and do nothing.

The functions of kernels/backends/triton allocate the results of their kernels as any code of torch does. So a traced
run takes the memory of the kernels that a GPU would run, on a machine with or without Triton.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

_KERNELS = "megatron.kernels.backends.triton"


class SimulatedKernel:
    """Stands for a function that Triton compiles: `kernel[grid](...)` launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return _launch


@contextlib.contextmanager
def simulated_triton(capability: tuple[int, int]) -> Iterator[None]:
    """In the body the kernels in Triton are those of a device of this compute capability, and launch nothing."""
    with _replaced(_KERNELS, {}):
        with _replaced("triton", _modules(capability)):  # not longer: torch looks for Triton, too
            package = importlib.import_module(_KERNELS)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{_KERNELS}.{module.name}")
        yield


@contextlib.contextmanager
def _replaced(package: str, modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """In the body the package consists of these modules, and of what is imported meanwhile."""
    hidden = _taken(package)
    sys.modules.update(modules)
    try:
        yield
    finally:
        _taken(package)
        sys.modules.update(hidden)


def _taken(package: str) -> dict[str, ModuleType]:
    """Takes the modules of a package out of sys.modules."""
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in names}


def _modules(capability: tuple[int, int]) -> dict[str, ModuleType]:
    """Returns the modules that kernels/backends/triton imports, by name."""
    target = SimpleNamespace(arch=10 * capability[0] + capability[1])
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    language = _module("triton.language", constexpr=lambda value: SimpleNamespace(value=value))
    runtime = _module("triton.runtime", driver=driver)
    package = _module(
        "triton",
        jit=_jit,
        cdiv=lambda count, size: -(-count // size),
        next_power_of_2=lambda count: 1 << max(count - 1, 0).bit_length(),
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
        language=language,
        runtime=runtime,
    )
    return {module.__name__: module for module in (package, language, runtime)}


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """triton.jit, with or without options."""
    return SimulatedKernel() if function is not None else lambda later: SimulatedKernel()


def _launch(*arguments: Any, **options: Any) -> None:
    """Runs no kernel."""
