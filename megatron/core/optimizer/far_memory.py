"""Far memory: host memory, pinned where a device copies to and from it, or files of a folder that are mapped into memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import torch
from torch import Tensor

from megatron.base.errors import ConfigError

Shapes = Mapping[str, tuple[int, torch.dtype]]  # key -> (elements, dtype) of flat tensors


class HostMemory:
    """Memory of the host, there when it is taken."""

    is_direct = True  # a device's copies may read and write it without an intermediate buffer

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def take(self, shapes: Shapes) -> Held:
        """Undefined tensors. They are pinned in their final dtype: what a conversion of pinned memory gives is not."""
        return Held(
            {key: torch.empty(size, dtype=dtype, pin_memory=self._pinned) for key, (size, dtype) in shapes.items()}
        )


class Held:
    """Flat tensors by key, for as long as this object or one of them is there."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def ahead(self) -> None:
        """They are used next: bring them in."""

    def behind(self) -> None:
        """They were changed and are not used soon: write them out."""


class DiskMemory:
    """Files of a folder, one a chunk, mapped into memory: the kernel keeps in memory what it has room for.

    The kernel is told what is read next, and what can be written, while another chunk is computed on. Files have no name:
    they vanish with the process, however it ends.
    """

    is_direct = False

    def __init__(self, directory: str, needed: int) -> None:
        """needed: bytes that will be taken at most. Raises ConfigError when the folder cannot hold them."""
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, "write-behind")
        if not os.path.isdir(directory):
            raise ConfigError(f"--offload-dir {directory} is not a folder; make it, or give another one")
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        if free < needed:
            raise ConfigError(
                f"--offload-dir {directory} has {free} bytes free and a rank's part of the optimizer takes {needed}; "
                "give a larger disk, or offload less"
            )

    def take(self, shapes: Shapes) -> Held:
        """Undefined tensors. Raises ConfigError when the folder is full or not writable."""
        total = sum(size * dtype.itemsize for size, dtype in shapes.values())
        try:
            file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - the tensors keep it open
            os.posix_fallocate(file.fileno(), 0, total)
        except OSError as error:
            raise ConfigError(
                f"--offload-dir {self._directory} cannot hold {total} more bytes ({error.strerror}); give another folder"
            ) from error
        return _MappedFile(file, total, shapes, self._writer)


class _MappedFile(Held):
    def __init__(self, file: IO[bytes], total: int, shapes: Shapes, writer: ThreadPoolExecutor) -> None:
        self._file, self._writer = file, writer
        self._pages = mmap.mmap(file.fileno(), total)
        tensors, start = {}, 0
        for key, (size, dtype) in shapes.items():
            tensors[key] = torch.frombuffer(self._pages, dtype=dtype, count=size, offset=start)
            start += size * dtype.itemsize
        super().__init__(tensors)

    def ahead(self) -> None:
        """The kernel begins to read; nobody waits."""
        self._pages.madvise(mmap.MADV_WILLNEED)

    def behind(self) -> None:
        """Another thread sees it written; then the kernel may drop it when memory is short."""
        self._writer.submit(self._flush)

    def _flush(self) -> None:
        os.fdatasync(self._file.fileno())
