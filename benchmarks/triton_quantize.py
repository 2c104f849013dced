"""The calls of quantization to FP8 for benchmarks/triton_kernels.py."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from megatron.kernels.ops.fp8.formats import E4M3
from megatron.kernels.ops.fp8.quantize import MICRO, SQUARE, VECTOR

DIRECTIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
BLOCKS = {"1 x 128": VECTOR, "128 x 128": SQUARE, "1 x 32": MICRO}


def quantize_calls(tokens: int, width: int, device: str) -> dict[str, Callable[[], object]]:
    """Returns the calls for a bf16 matrix [tokens, width]: each kernel in each direction."""
    kernels = importlib.import_module("megatron.kernels.backends.triton.quantize")
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    scale, amax = (torch.ones(1, device=device) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"FP8, amaxes": functools.partial(kernels.amaxes, x)}
    amaxes = torch.ones(kernels.PARTS.value, device=device)
    for direction, (rows, columns) in DIRECTIONS.items():
        asked = {"rows": rows, "columns": columns}
        calls[f"FP8, one scale, {direction}"] = functools.partial(
            kernels.per_tensor, x, scale, E4M3, **asked, amax=amax
        )
        calls[f"FP8, scale of amaxes, {direction}"] = functools.partial(kernels.by_amaxes, x, amaxes, E4M3, 0, **asked)
        for name, block in BLOCKS.items():
            calls[f"FP8, {name}, {direction}"] = functools.partial(kernels.per_block, x, block, E4M3, **asked)
    return calls
