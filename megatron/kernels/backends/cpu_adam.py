"""AdamW in one pass over host memory: calls the compiled module of cpu_adam.cpp with the addresses of tensors.

setup.py builds the module if there is a compiler. It needs AVX2 with FMA, AVX-512 or NEON.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from megatron.kernels.backends import _cpu_adam
except ImportError:
    _cpu_adam = None  # type: ignore[assignment]


def missing() -> str | None:
    """Returns the reason why the kernel cannot run here, or None if it can."""
    if _cpu_adam is None:
        return "it was not built; install the package again with a C++ compiler (pip install -v shows its messages)"
    return None if _cpu_adam.runs_here() else "the CPU has neither AVX2 with FMA nor AVX-512"


def step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    coefficients: tuple[float, ...],
) -> None:
    """Runs one step on torch's number of threads, without holding the GIL.

    Shapes, dtypes and meaning are those of ops/adam.py, which also computes the eight coefficients. The writes do not
    increase the version numbers of the tensors.
    """
    tensors = [t for t in (param, grad, exp_avg, exp_avg_sq, out) if t is not None]
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors), [(t.stride(), t.device) for t in tensors]
    _cpu_adam.step(
        _format(grad), _format(out), grad.data_ptr(), param.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
        param.data_ptr() if out is None else out.data_ptr(), param.numel(), torch.get_num_threads(), *coefficients,
    )  # fmt: skip


def _format(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(tensor.dtype).removeprefix("torch.")
