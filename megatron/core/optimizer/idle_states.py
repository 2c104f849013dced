"""Optimizer states that are in host memory while no update needs their memory on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.core.offload.host_pool import HostPool
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk


class IdleStates:
    """Moves the states of chunks, which the device updates, to host memory and back. Their values do not change.

    The host memory is taken at the first move, as much as the states take on the device, and stays for the next ones.
    """

    def __init__(self, chunks: Sequence[OptimizerChunk], pool: HostPool) -> None:
        self._chunks, self._pool = list(chunks), pool
        self._host: dict[OptimizerChunk, dict[str, Tensor]] = {}
        self.is_on_host = False

    @property
    def nbytes(self) -> int:
        """Bytes of the host memory."""
        return self._pool.nbytes

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """The states are in host memory in the body, which must not update them."""
        for chunk in self._chunks:
            if chunk not in self._host:
                _, self._host[chunk] = self._pool.take_tensors(chunk.shapes(on_cpu=False))
            chunk.move(self._host[chunk], on_cpu=False)
        self.is_on_host = True
        try:
            yield
        finally:
            self.is_on_host = False
            for chunk in self._chunks:
                chunk.move(chunk.on_device(), on_cpu=False)
