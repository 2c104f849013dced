"""Far memory: host memory, page-locked for CUDA, or memory-mapped files; as blocks of exact size that are reused.

torch's own pinned allocator rounds up to a power of two, which for activations wastes a quarter of host memory on
average, and never gives anything back. Here a block is as large as was asked for, up to a page, and there are never
more blocks than were in use at once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError


class Block:
    """`bytes`: uint8 [n] of far memory. busy: the last copy from or to it, as its copier knows it; the next comes after."""

    def __init__(self, memory: Tensor, *, pinned: bool) -> None:
        self.bytes = memory
        self.busy: Any = None
        if pinned:
            _pin(memory)
            # The mapping outlives its registration: the finalizer holds it.
            weakref.finalize(self, _unpin, memory).atexit = False


class FarMemory:
    """A pool of blocks. After the first step of a run, when shapes repeat, it neither grows nor shrinks."""

    def __init__(self, *, pinned: bool, directory: Path | None = None) -> None:
        """pinned: page-locked, for copies of a CUDA device. directory: blocks are files there, without a name, so that
        they are gone with the process. Raises ConfigError for a folder that cannot be written."""
        self._pinned, self._directory = pinned, directory
        self._free: list[Block] = []
        self._taken: set[Block] = set()
        self.made = 0  # blocks that were allocated so far
        if directory is not None:
            _file(directory, mmap.PAGESIZE)

    @property
    def nbytes(self) -> int:
        """Of all blocks, in use or not."""
        return sum(block.bytes.numel() for block in (*self._free, *self._taken))

    def take(self, nbytes: int) -> Block:
        """The smallest free block that is large enough, else a new one. Raises ConfigError when a disk is full.

        A new one takes the place of the largest that was too small, if there is one: sizes that change from step to
        step do not pile up.
        """
        fits = [block for block in self._free if block.bytes.numel() >= nbytes]
        if fits:
            block = min(fits, key=lambda block: block.bytes.numel())
            self._free.remove(block)
        else:
            if self._free:
                largest = max(self._free, key=lambda block: block.bytes.numel())
                self._free.remove(largest)
                self._settle(largest)
            block = Block(self._allocate(nbytes), pinned=self._pinned)
            self.made += 1
        self._taken.add(block)
        return block

    def give(self, block: Block) -> None:
        """The block may be overwritten, by copies that come after its last one."""
        self._taken.remove(block)
        self._free.append(block)

    def reclaim(self) -> None:
        """Blocks that nobody gave back, because a graph was dropped without a backward, are free."""
        self._free += self._taken
        self._taken.clear()

    def discard(self, block: Block) -> None:
        """The block is given back to the system, as soon as nobody uses it."""
        self._taken.remove(block)
        self._settle(block)

    def _settle(self, block: Block) -> None:
        """Before its pages are unlocked the last copy has to be over. On the CPU the copy holds the block itself."""
        if self._pinned and block.busy is not None:
            block.busy.synchronize()

    def _allocate(self, nbytes: int) -> Tensor:
        # A mapping has its pages to itself, which page-locking asks for.
        memory = mmap.mmap(-1, nbytes) if self._directory is None else _file(self._directory, nbytes)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _file(directory: Path, nbytes: int) -> mmap.mmap:
    """Its space is reserved now: a full disk would kill the process at the first write to a page."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        failure = ConfigError(
            f"--offload-dir {directory} cannot take {nbytes} bytes ({error.strerror}); give a folder with more room, or "
            "offload less"
        )
        failure.on_all_ranks = False  # in the middle of a step, or on one host
        raise failure from error


def _pin(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))


def _unpin(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
