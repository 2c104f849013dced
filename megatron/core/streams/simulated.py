"""A GPU that does not exist: the calls of torch.cuda that a run makes, answered for an assumed device.

A dry run traces the CUDA code of a run, with tensors that have no memory, on any machine. So that nothing else needs to
know about it, the functions of torch.cuda themselves are replaced while it runs. No kernel runs and nothing is waited
for.

[Note: when simulated work is over] The host queues work and goes on, so on a device the last operation of a stream is
still under way when the host asks for it. So an event counts as reached when its stream has recorded a later one, or
when the host has waited for it. A tensor that an operation needs is then held as long as on a device whose streams are
one operation behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.core.streams.stream import Operation, Stream, Waitable, Work
from megatron.core.streams.streams import Streams
from megatron.core.streams.thread import Completed
from megatron.core.streams.turns import OneByOne
from megatron.core.timeline import Span, Timeline


@dataclass(frozen=True)
class AssumedDevice:
    """A GPU. memory: bytes. per_host: devices of a host."""

    name: str
    capability: tuple[int, int]
    memory: int
    per_host: int


H100 = AssumedDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 * 10**9, 8)


class SimulatedStream:
    """Stands for a torch.cuda.Stream."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.recorded = 0  # events so far
        self.reached = 0  # events that the host has waited for

    def wait_stream(self, other: SimulatedStream) -> None:
        """As torch's; work is queued in order, so there is nothing to do."""

    def wait_event(self, event: SimulatedEvent) -> None:
        """As torch's."""

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """As torch's."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """As torch's."""
        self.reached = self.recorded


class SimulatedEvent:
    """Stands for a torch.cuda.Event that has been recorded on a stream."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._stream: SimulatedStream | None = None
        self._number = 0

    def record(self, stream: SimulatedStream) -> None:
        """As torch's."""
        stream.recorded += 1
        self._stream, self._number = stream, stream.recorded

    def query(self) -> bool:
        """See [Note: when simulated work is over]."""
        stream = self._stream
        return stream is None or stream.recorded > self._number or stream.reached >= self._number

    def synchronize(self) -> None:
        """As torch's."""
        if self._stream is not None:
            self._stream.reached = max(self._stream.reached, self._number)

    def elapsed_time(self, later: SimulatedEvent) -> float:
        """Nothing takes time."""
        return 0.0


class UntracedStream:
    """A stream of the host that does nothing. See Stream.

    Computation of the host next to the device takes no memory of the device, and kernels of the CPU need real memory.
    """

    def submit(
        self,
        operation: Operation,
        name: str,
        *,
        row: str | None = None,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""
        operation.close()
        return Completed()

    def run(
        self,
        function: Callable[[], None],
        name: str,
        *,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""
        return Completed()

    def begin(self, name: str) -> Span | None:
        """See Stream."""
        return None

    def follow(self, work: Waitable, span: Span | None) -> Waitable:
        """See Stream."""
        return work


class SimulatedStreams(Streams):
    """Streams of a simulated device. Work that the host would do concurrently is left out."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        super().__init__(device, timeline)
        self.turns = OneByOne(device)

    def host_stream(self, name: str) -> Stream:
        """See Streams."""
        return UntracedStream()


class _HostGenerator(torch.Generator):
    """A generator of random numbers of the host, for whichever device it is asked."""

    def __new__(cls, device: Any = None) -> _HostGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch declares its constructor elsewhere


class _SimulatedCuda:
    """The replaced functions, by the names that they have in torch.cuda."""

    def __init__(self, assumed: AssumedDevice, allocated: Callable[[], int]) -> None:
        self._assumed, self._allocated = assumed, allocated
        self._streams = [SimulatedStream(torch.device("cuda", 0))]  # the current one last

    def functions(self) -> dict[str, Any]:
        """Name -> replacement."""
        assumed, allocated = self._assumed, self._allocated
        properties = SimpleNamespace(
            name=assumed.name, total_memory=assumed.memory, major=assumed.capability[0], minor=assumed.capability[1]
        )
        return {
            "Stream": SimulatedStream,
            "Event": SimulatedEvent,
            "stream": self._entered,
            "current_stream": lambda device=None: self._streams[-1],
            "is_available": lambda: False,  # torch itself must not look for a device
            "device_count": lambda: assumed.per_host,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "get_device_name": lambda device=None: assumed.name,
            "get_device_capability": lambda device=None: assumed.capability,
            "get_device_properties": lambda device=None: properties,
            "can_device_access_peer": lambda device, other: True,
            "memory_allocated": lambda device=None: allocated(),
            "max_memory_allocated": lambda device=None: allocated(),
            "reset_peak_memory_stats": lambda device=None: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": _set_rng_state,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=_succeeds, cudaHostUnregister=_succeeds),
            "check_error": lambda code: None,
        }

    @contextlib.contextmanager
    def _entered(self, stream: SimulatedStream) -> Iterator[None]:
        self._streams.append(stream)
        yield
        self._streams.pop()


@contextlib.contextmanager
def simulated_cuda(assumed: AssumedDevice, allocated: Callable[[], int]) -> Iterator[None]:
    """In the body torch.cuda behaves as on a machine with the assumed device. `allocated`: returns the bytes in use."""
    with contextlib.ExitStack() as replaced:
        for name, function in _SimulatedCuda(assumed, allocated).functions().items():
            _replace(replaced, torch.cuda, name, function)
        _replace(replaced, torch, "Generator", _HostGenerator)
        yield


def _replace(replaced: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    replaced.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _set_rng_state(state: Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _succeeds(*arguments: int) -> int:
    return 0
