"""Host memory for everything that is offloaded: page-locked for CUDA, or memory-mapped files; in blocks of exact size.

PyTorch's own pinned allocator rounds up to a power of two, which wastes a quarter of host memory on average, and never
gives memory back. A block here is as large as was asked for, up to a page, and freed blocks are reused.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.core.streams.stream import Work

Shapes = Mapping[str, tuple[int, torch.dtype]]  # key -> (elements, dtype) of flat tensors


class HostBlock:
    """A range of host memory.

    bytes: uint8 [nbytes]. last_copy: the last copy from or to the block, if any; the copy engine orders the next one
    behind it.
    """

    def __init__(self, pages: mmap.mmap, *, pinned: bool, file: IO[bytes] | None, writer: ThreadPoolExecutor) -> None:
        """`file`: the file that `pages` maps, None for anonymous memory. `writer`: thread that writes files back."""
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.last_copy: Work | None = None
        self._pages, self._file, self._writer = pages, file, writer
        if pinned:
            _pin(self.bytes)
            # The mapping outlives its registration, because the finalizer holds it.
            weakref.finalize(self, _unpin, self.bytes).atexit = False

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return self.bytes.numel()

    def tensors(self, shapes: Shapes) -> dict[str, Tensor]:
        """Views of the block, one behind the other: undefined flat tensors of these sizes and dtypes."""
        views, start = {}, 0
        for key, (size, dtype) in shapes.items():
            stop = start + size * dtype.itemsize
            views[key], start = self.bytes[start:stop].view(dtype), stop
        return views

    def synchronize(self) -> None:
        """Block the host until the last copy is over: the host may read and write the block."""
        if self.last_copy is not None:
            self.last_copy.synchronize()

    def read_ahead(self) -> None:
        """The host will read the block soon: let the kernel start to load a file's pages. Does not wait."""
        if self._file is not None:
            self._pages.madvise(mmap.MADV_WILLNEED)

    def write_back(self) -> None:
        """Write a file's changed pages in the background, after the last copy, so that the kernel may drop them."""
        if self._file is not None:
            self._writer.submit(self._flush, self._file.fileno())

    def _flush(self, file: int) -> None:
        self.synchronize()
        os.fdatasync(file)


class HostPool:
    """A pool of blocks. After the first step of a run, when sizes repeat, it neither grows nor shrinks."""

    def __init__(self, *, pinned: bool, directory: Path | None = None, needed: int = mmap.PAGESIZE) -> None:
        """pinned: page-lock the memory, for asynchronous copies of a CUDA device. directory: blocks are files there,
        without a name, so that they vanish with the process. needed: bytes that are known to be taken.

        Raises ConfigError for a folder that cannot be written or has less room than `needed`.
        """
        self._pinned, self._directory = pinned, directory
        self._writer = ThreadPoolExecutor(1, "write-back")
        self._free: list[HostBlock] = []
        self._taken: set[HostBlock] = set()
        self.num_allocated = 0  # blocks so far, including those given back to the system
        if directory is not None:
            _check_room(directory, needed)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or not."""
        return sum(block.nbytes for block in (*self._free, *self._taken))

    @property
    def is_on_disk(self) -> bool:
        """Whether blocks are files. A device cannot copy from them asynchronously."""
        return self._directory is not None

    def take(self, nbytes: int) -> HostBlock:
        """The smallest free block that is large enough, else a new one. Raises ConfigError when a disk is full.

        A new block replaces the largest of the free blocks, which was too small: sizes that change from step to step do
        not pile up.
        """
        fits = [block for block in self._free if block.nbytes >= nbytes]
        if fits:
            block = min(fits, key=lambda block: block.nbytes)
            self._free.remove(block)
        else:
            if self._free:
                largest = max(self._free, key=lambda block: block.nbytes)
                self._free.remove(largest)
                self._synchronize(largest)
            block = self._allocate(nbytes)
            self.num_allocated += 1
        self._taken.add(block)
        return block

    def take_tensors(self, shapes: Shapes) -> tuple[HostBlock, dict[str, Tensor]]:
        """(block, undefined flat tensors in it). They are valid while the block is taken; errors as `take`."""
        block = self.take(sum(size * dtype.itemsize for size, dtype in shapes.values()))
        return block, block.tensors(shapes)

    def give_back(self, block: HostBlock) -> None:
        """The block may be overwritten by copies that follow its last one."""
        self._taken.remove(block)
        self._free.append(block)

    def reclaim(self) -> None:
        """Free all blocks that are still taken, because a graph was dropped without a backward."""
        self._free += self._taken
        self._taken.clear()

    def discard(self, block: HostBlock) -> None:
        """Return the block to the system as soon as nothing refers to it."""
        self._taken.remove(block)
        self._synchronize(block)

    def _synchronize(self, block: HostBlock) -> None:
        """Wait for the last copy before pages are unlocked. On the CPU the copy itself keeps the memory alive."""
        if self._pinned:
            block.synchronize()

    def _allocate(self, nbytes: int) -> HostBlock:
        file = None if self._directory is None else _file(self._directory, nbytes)
        # A mapping has its pages to itself, as page-locking requires.
        pages = mmap.mmap(-1 if file is None else file.fileno(), nbytes)
        return HostBlock(pages, pinned=self._pinned, file=file, writer=self._writer)


def _check_room(directory: Path, needed: int) -> None:
    if not directory.is_dir():
        raise _error(f"--offload-dir {directory} is not a folder; make it, or give another one")
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if free < needed:
        raise _error(
            f"--offload-dir {directory} has {free} bytes free and this rank offloads {needed}; give a folder on a "
            "larger disk, or offload less"
        )
    _file(directory, mmap.PAGESIZE).close()


def _file(directory: Path, nbytes: int) -> IO[bytes]:
    """An unnamed file whose space is reserved now: a full disk would kill the process at the first write to a page."""
    try:
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - the block keeps it open
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise _error(
            f"--offload-dir {directory} cannot hold {nbytes} more bytes ({error.strerror}); give a folder with more "
            "room, or offload less"
        ) from error
    return file


def _error(message: str) -> ConfigError:
    error = ConfigError(message)
    error.on_all_ranks = False  # other hosts have other disks
    return error


def _pin(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))


def _unpin(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
