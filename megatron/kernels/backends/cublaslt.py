"""Products of FP8 matrices that cuBLASLt adds to an fp32 matrix, which torch's scaled products cannot do.

torch multiplies FP8 matrices by this library, so it has loaded it, and its handle of cuBLAS is one of cuBLASLt, too.
The numbers below are those of cublasLt.h (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).

The library's matrices are stored column by column: one that is stored row by row is read as its transpose, and the
result's transpose is the product in the other order.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops.fp8.formats import E4M3, E5M2
from megatron.kernels.ops.fp8.quantize import MICRO, SQUARE, VECTOR, Quantized

_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, E4M3: 28, E5M2: 29}
_SCALES = {None: 0, MICRO: 2, VECTOR: 4, SQUARE: 5}  # by block
_TRANSPOSED = 1
# Attributes of a product, by operand A and B.
_TRANSPOSE_A, _SCALE, _SCALE_KIND = 3, (17, 18), (31, 32)
# Preferences for the search of a kernel: alignments of A, B, C and D.
_WORK_SPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_MOST_WORK_SPACE = 32 * 2**20  # bytes: NVIDIA's advice for Hopper
_MOST_ALIGNMENT = 256  # bytes that kernels differ by


class KernelChoice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a kernel, and the work space that it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("work_space", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def loaded() -> ctypes.CDLL:
    """Returns the library that torch has loaded. Raises OSError if it has not."""
    if torch.version.cuda is None:
        raise OSError("this torch is built without CUDA")
    major = torch.version.cuda.partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)


class CublasLt:
    """Calls the library. It keeps nothing between calls."""

    def __init__(self, library: Any) -> None:
        """library: see `loaded`."""
        self._library = library

    def add_product(self, out: Tensor, a: Quantized, b: Quantized) -> None:
        """Adds a [m, k] @ b [n, k].t() to out [m, n], fp32 and contiguous. The operands are ready for ScaledMM.

        Raises RuntimeError if the library has no kernel for it.
        """
        assert out.dtype == torch.float32 and out.is_contiguous()
        (m, k), n = a.data.shape, len(b.data)
        with ExitStack() as objects:
            product = self._create(objects, "MatmulDesc", _COMPUTE_FP32, _TYPES[torch.float32])
            self._set("MatmulDesc", product, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
            for place, operand in enumerate((b, a)):
                self._set("MatmulDesc", product, _SCALE[place], ctypes.c_void_p(operand.inverse.data_ptr()))
                if operand.block is not None:
                    self._set("MatmulDesc", product, _SCALE_KIND[place], ctypes.c_int32(_SCALES[operand.block]))
            of_b, of_a = self._layout(objects, b.data.dtype, k, n), self._layout(objects, a.data.dtype, k, m)
            of_out = self._layout(objects, out.dtype, n, m)
            kernel = self._search(product, (of_b, of_a, of_out, of_out), (b.data, a.data, out, out))
            space = torch.empty(kernel.work_space, dtype=torch.uint8, device=out.device)
            alpha_and_beta, into = ctypes.c_float(1.0), ctypes.c_void_p(out.data_ptr())
            self._call(
                "Matmul",
                ctypes.c_void_p(torch.cuda.current_blas_handle()),
                product,
                ctypes.byref(alpha_and_beta),
                ctypes.c_void_p(b.data.data_ptr()),
                of_b,
                ctypes.c_void_p(a.data.data_ptr()),
                of_a,
                ctypes.byref(alpha_and_beta),
                into,
                of_out,
                into,
                of_out,
                ctypes.byref(kernel),  # its first field is the kernel
                ctypes.c_void_p(space.data_ptr()),
                ctypes.c_size_t(kernel.work_space),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(out.device.index)),
            )

    def _search(
        self, product: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], tensors: tuple[Tensor, ...]
    ) -> KernelChoice:
        kernel, count = KernelChoice(), ctypes.c_int()
        with ExitStack() as objects:
            preference = self._create(objects, "MatmulPreference")
            self._set("MatmulPreference", preference, _WORK_SPACE, ctypes.c_uint64(_MOST_WORK_SPACE))
            for attribute, tensor in zip(_ALIGNMENTS, tensors, strict=True):
                address = tensor.data_ptr()
                aligned = min(_MOST_ALIGNMENT, address & -address)
                self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(aligned))
            self._call(
                "MatmulAlgoGetHeuristic",
                ctypes.c_void_p(torch.cuda.current_blas_handle()),
                product,
                *layouts,
                preference,
                1,
                ctypes.byref(kernel),
                ctypes.byref(count),
            )
        if not count.value or kernel.status:
            raise RuntimeError("cuBLASLt has no kernel that adds this product")
        return kernel

    def _layout(self, objects: ExitStack, dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        """Returns the layout of a matrix that is stored column by column, without gaps."""
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return self._create(objects, "MatrixLayout", _TYPES[dtype], *sizes)

    def _create(self, objects: ExitStack, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Returns a new object, which `objects` destroys."""
        handle = ctypes.c_void_p()
        self._call(f"{kind}Create", ctypes.byref(handle), *arguments)
        objects.callback(self._call, f"{kind}Destroy", handle)
        return handle

    def _set(self, kind: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(f"{kind}SetAttribute", handle, attribute, ctypes.byref(value), size)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} returns status {status}")
