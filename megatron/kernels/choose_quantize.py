"""The kernels that quantize to FP8 in a run: Triton's where they run and give the reference's bits, else plain
torch."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from megatron.kernels import fused
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.quantize import MICRO, SEPARATE, SQUARE, VECTOR, Both, QuantizeKernels

_ROWS, _COLUMNS = 144, 272  # of the trial: whole blocks, and smaller ones


def choose_quantize(device: torch.device) -> tuple[QuantizeKernels, str | None]:
    """Returns the kernels, and the reason why they are plain torch (None if they are Triton's).

    They are tried, because whether Triton can compile for a GPU is known for certain only then.
    """
    why = fused.missing(device)
    if why is not None:
        return SEPARATE, why
    kernels = load()
    failure = fused.failure_of(lambda: _compare(kernels, device))
    return (kernels, None) if failure is None else (SEPARATE, failure)


def load() -> QuantizeKernels:
    """Returns the kernels in Triton, which is imported here."""
    kernels = importlib.import_module("megatron.kernels.backends.triton.quantize")
    return QuantizeKernels(kernels.per_tensor, kernels.per_block, kernels.amaxes, kernels.by_amaxes)


def _compare(kernels: QuantizeKernels, device: torch.device) -> None:
    """Raises RuntimeError if bits differ from the reference's."""
    powers = fused.numbers(device, torch.float32, _ROWS, _COLUMNS, turns=0.01).mul_(8.0).exp2_()
    x = fused.numbers(device, torch.float32, _ROWS, _COLUMNS).mul_(powers).bfloat16()
    scale = torch.full((1,), 0.37, device=device)
    for of in set(FORMATS["hybrid"]):
        results, expected = (_quantized(quantize, x, scale, of) for quantize in (kernels, SEPARATE))
        if not all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
            raise RuntimeError("its results are wrong")


def _quantized(kernels: QuantizeKernels, x: Tensor, scale: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns the data and factors of every kernel in both directions, and the magnitudes that two of them find."""
    amax, amaxes = torch.zeros_like(scale), kernels.amaxes(x)
    quantized = [
        kernels.per_tensor(x, scale, dtype, rows=True, columns=True, amax=amax),
        kernels.by_amaxes(x, amaxes, dtype, 1, rows=True, columns=True),
    ]
    for block in (VECTOR, SQUARE, MICRO):
        quantized.append(kernels.per_block(x, block, dtype, rows=True, columns=True))
    return [amax, amaxes.max(), *(tensor for both in quantized for tensor in _tensors(both))]


def _tensors(both: Both) -> list[Tensor]:
    return [
        tensor.float() for quantized in both if quantized is not None for tensor in (quantized.data, quantized.inverse)
    ]
