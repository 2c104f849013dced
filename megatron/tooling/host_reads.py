"""Counts how often the host would wait for a device, on any machine: the CPU runs the same program as a GPU."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_PACKAGE = Path(__file__).parents[1]
# Samples lie in host memory until a batch is copied to the device.
_OF_THE_HOST = ("core/datasets/",)
# Operations that CUDA runs only when the host has read how large their result is, or that return numbers of Python.
_OPERATIONS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "unique_consecutive", "_unique2",
    "bincount"
}  # fmt: skip
# Functions whose reads do not pass torch's dispatcher on the CPU.
_FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.cpu}


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yields a list, to which every read of the calling thread in the body adds the place in this package, "FILE:LINE".

    Reads are `item`, `tolist`, `cpu`, conversions to Python's numbers, and operations whose result has a size that
    depends on values. Not seen are `numpy`, which no tensor of a device has, and `to`, whose destination may be the
    device.
    """
    places: list[str] = []
    with _Functions(places), _Operations(places):
        yield places


class _Functions(TorchFunctionMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch."""
        if func in _FUNCTIONS:
            _record(self._places)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch imports its compiler to skip it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        if _reads(func, args, kwargs or {}):
            _record(self._places)
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    name = func._schema.name.rpartition("::")[2]
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _OPERATIONS


def _record(places: list[str]) -> None:
    frames = [
        (Path(frame.filename).relative_to(_PACKAGE).as_posix(), frame.lineno)
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to(_PACKAGE) and frame.filename != __file__
    ]
    if frames and not any(file.startswith(_OF_THE_HOST) for file, _ in frames):
        file, line = frames[-1]
        places.append(f"{file}:{line}")
