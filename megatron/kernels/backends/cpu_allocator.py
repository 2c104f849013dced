"""Bytes of CPU tensors, counted where torch allocates them: cpu_allocator.cpp, compiled when it is first asked for.

Seen: every tensor of every thread, and what torch's kernels take from the same allocator while they run. Not seen:
tensors made before counting began, memory that is not torch's (numpy, gloo, oneDNN's scratch, Python itself), and how the
C library rounds blocks and keeps free ones.
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
    """Counts from the first object of a process on, for all of them and until it ends."""

    def __init__(self) -> None:
        """Raises OSError with the reason where it cannot be compiled or loaded. Takes about two seconds once."""
        self._library = _library()

    @property
    def allocated(self) -> int:
        """Bytes in use now."""
        return int(self._library.allocated_bytes())

    @property
    def peak(self) -> int:
        """The most in use since `reset_peak`, or since counting began."""
        return int(self._library.peak_bytes())

    def reset_peak(self) -> None:
        """From now on."""
        self._library.reset_peak()


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
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
