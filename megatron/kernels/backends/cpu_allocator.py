"""Counts the bytes of CPU tensors where torch allocates them: cpu_allocator.cpp, compiled on first use.

Counted are all tensors of all threads, and temporary memory that torch's kernels take from the same allocator. Not
counted are tensors made before counting began, memory outside torch (numpy, gloo, oneDNN's scratch, Python itself), and
the rounding and free blocks of the C library.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_SECONDS = 120


class CpuMemory:
    """Counts from the first object of a process on. All objects share the counts, and counting never stops."""

    def __init__(self) -> None:
        """Compiles the library, which takes about two seconds once. Raises OSError with the reason if this fails."""
        self._library = _library()

    @property
    def allocated(self) -> int:
        """Bytes in use now."""
        return int(self._library.allocated_bytes())

    @property
    def peak(self) -> int:
        """The largest number of bytes in use since `reset_peak`, or since counting began."""
        return int(self._library.peak_bytes())

    def reset_peak(self) -> None:
        """Makes `peak` count from now on."""
        self._library.reset_peak()


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cpu_allocator.so"
        command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", str(_SOURCE), "-o", str(library)]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command += [abi, f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{compiler} took longer than {_SECONDS} s") from error
        if done.returncode:
            raise OSError(f"{compiler}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
        loaded = ctypes.CDLL(str(library))
    for name in ("allocated_bytes", "peak_bytes"):
        getattr(loaded, name).restype = ctypes.c_longlong
    loaded.install()
    return loaded
