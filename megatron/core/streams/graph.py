"""Graphs: kernels that are captured once and then queued again as a whole, without the host's part of the work.

What is captured is fixed: the kernels, their arguments, and the addresses of the tensors that they read and write. Code
of the host runs at the capture only. Graphs of one pool share memory: a tensor that nothing holds after a capture gives
its memory to the next ones. So they must be replayed in the order in which they were captured, and a tensor that is
read after a replay has to be held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """The kernels of one function."""

    def capture(self, function: Callable[[], T]) -> T:
        """Call the function once, and keep its kernels instead of running them; the values of its tensors are
        undefined."""
        ...

    def replay(self) -> None:
        """Queue the kernels on the current stream."""
        ...


class GraphPool(Protocol):
    """Memory that graphs share; see the file."""

    def graph(self) -> Graph:
        """A graph that has not captured anything."""
        ...


class CudaGraphs:
    """Makes pools of CUDA graphs, which are all captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> GraphPool:
        """An empty pool."""
        return CudaGraphPool(self._stream)


class CudaGraphPool:
    """See GraphPool. Captures wait for the device, so that no kernel of a step may be waiting for another rank."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._handle = stream, torch.cuda.graph_pool_handle()

    def graph(self) -> Graph:
        """See GraphPool."""
        return _CudaGraph(self._handle, self._stream)


class _CudaGraph:
    """See Graph."""

    def __init__(self, handle: torch.cuda._POOL_HANDLE, stream: torch.cuda.Stream) -> None:
        self._handle, self._stream = handle, stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], T]) -> T:
        """See Graph. Other threads may go on using the device: the heartbeat asks events, and data is pinned."""
        with torch.cuda.graph(self._graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        """See Graph."""
        self._graph.replay()


def is_capturing() -> bool:
    """Whether kernels of the current stream are being captured. Then no event of the stream can be asked, now or
    later."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
