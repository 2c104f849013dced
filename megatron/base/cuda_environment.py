"""Environment variables that torch, cuBLAS and NCCL read when they start on CUDA: the defaults of a run.

Variables that the user has set stay. This file does not import torch, which reads some of them while it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, MutableMapping

from megatron.base.errors import ConfigError

# ZeRO-3, offload and recompute free and allocate tensors of many sizes all the time. Segments that grow do not leave
# holes that nothing fits.
ALLOCATOR = "expandable_segments:True"
# torch reads the first of these that is set, and warns of the second.
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Where Transformer Engine looks for cuDNN first.
_CUDNN_NAMES = ("CUDNN_HOME", "CUDNN_PATH")
_CUDNN_WHEEL = "nvidia.cudnn"
# Fixed work spaces for cuBLAS, and sums of NCCL in one order. Both may be faster otherwise.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
_FIXED_WORKSPACES = (":4096:8", ":16:8")


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Sets the default of torch's CUDA allocator. Must run before torch is imported."""
    if not any(name in environment for name in _ALLOCATOR_NAMES):
        environment[_ALLOCATOR_NAMES[0]] = ALLOCATOR


def set_cudnn(environment: MutableMapping[str, str]) -> None:
    """Makes Transformer Engine take the cuDNN of torch's wheels, if torch came with one. Must run before it is
    imported.

    It would take one of the system first, of which it then loads parts beside those that torch has loaded. Parts of two
    versions do not fit together.
    """
    if any(environment.get(name) for name in _CUDNN_NAMES):
        return
    with contextlib.suppress(ModuleNotFoundError):  # no package of NVIDIA's
        wheel = importlib.util.find_spec(_CUDNN_WHEEL)
        if wheel is not None and wheel.submodule_search_locations:
            environment[_CUDNN_NAMES[0]] = next(iter(wheel.submodule_search_locations))


def set_deterministic(environment: MutableMapping[str, str]) -> None:
    """Sets the defaults of --deterministic-mode. Must run before the first CUDA call of the process.

    Raises ConfigError for a variable that contradicts it.
    """
    for name, value in _DETERMINISTIC.items():
        environment.setdefault(name, value)
    workspace, algorithms = (environment[name] for name in _DETERMINISTIC)
    if workspace not in _FIXED_WORKSPACES:
        fixed = " or ".join(_FIXED_WORKSPACES)
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG={workspace} contradicts --deterministic-mode; unset it, or set it to {fixed}"
        )
    if "NVLS" in algorithms.upper() and not algorithms.startswith("^"):
        raise ConfigError(
            f"NCCL_ALGO={algorithms} contradicts --deterministic-mode: the switch adds in any order; unset it"
        )


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Returns the settings of torch's CUDA allocator, or "" where none are set."""
    return next((environment[name] for name in _ALLOCATOR_NAMES if name in environment), "")


def deterministic_settings(environment: Mapping[str, str]) -> str:
    """Returns the variables of --deterministic-mode with their values, for the start-up table."""
    return ", ".join(f"{name}={environment[name]}" for name in _DETERMINISTIC if name in environment)
