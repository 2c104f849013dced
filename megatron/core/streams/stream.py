"""The interface of asynchronous work: a `Stream` runs operations concurrently with compute, a `Work` is one of them.

[Note: order of operations] Operations of one stream start in the order of submission. Those that communicate go on in
this order, too: the code after the n-th yield of one runs after that of all earlier ones that yield as often, a wait
for `after` being the first yield. Nothing else about their order is promised: whoever needs the result of an operation
names its work in `after`, yields it from an operation, or calls `wait`. Compute is ordered only by `wait`. CUDA happens
to keep a stream in order from start to end; a thread finishes an operation that waits for two messages after a later
one that waits for one. So an implementation may delay an operation for as long as nothing waits for it. tests/adversary
has one that does. `after` names work that was submitted before. So what an operation waits for never depends on a later
one, and streams cannot wait for each other in a circle.

[Note: lifetimes of tensors] The caching allocator knows a tensor as belonging to the stream that was current when it
was allocated, and gives its memory to the next kernel of that stream as soon as the tensor is freed. So an operation's
tensors (`keep`) are held until the stream that submitted it has been ordered behind it by `wait`, or the operation is
over. No record_stream is needed, and memory freed after `wait` is usable at once. What an operation allocates itself
belongs to the operation's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from torch import Tensor

from megatron.core.timeline import Span


class Waitable(Protocol):
    """A work of a stream, or one of torch.distributed."""

    def wait(self) -> object:
        """Order everything that the caller does next after it."""
        ...


class Work(Protocol):
    """An operation in flight. Its tensors must not be written, and its results not be read, before `wait`."""

    def wait(self) -> None:
        """Order everything that the caller does next after the operation.

        On CUDA the current stream waits, not the host. On the CPU the calling thread blocks, and what the operation
        raised is raised here.
        """
        ...

    def is_completed(self) -> bool:
        """Whether the operation is over, or has failed."""
        ...

    def synchronize(self) -> None:
        """Block the host until the operation is over: it may read and write its tensors. Raises as `wait` does."""
        ...


# A generator that starts transfers and yields what must be waited for before it goes on. On CUDA it is run to its end
# at
# once: its stream is the current one, and waits for what it yields. On the CPU it goes on when that has arrived.
Operation = Generator[Sequence[Waitable], None, None]


class Stream(Protocol):
    """Runs operations concurrently with compute. Any thread may submit."""

    def submit(
        self,
        operation: Operation,
        name: str,
        *,
        row: str | None = None,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """Start an operation that communicates.

        Without `after` it starts behind everything that is queued on the current stream, and its first messages are
        posted by the calling thread, in the order of submission. With `after` it starts behind these works instead. On
        CUDA work of the host among them blocks the caller. name, row: of its span in the timeline, from its start to
        its end; the row is the stream's own by default. keep: see [Note: lifetimes of tensors]. On CUDA all of it is
        queued before this returns, and an exception of the operation is raised here; on the CPU it is raised by `wait`
        of the work.
        """
        ...

    def run(
        self,
        function: Callable[[], None],
        name: str,
        *,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """As `submit`, of a function that computes or copies: all of it runs on the thread, or is queued on the
        stream."""
        ...

    def begin(self, name: str) -> Span | None:
        """A span of this stream's row that begins behind everything queued on the current stream; None unless
        recording.

        For a transfer that has a work of its own, and so needs the stream for its end alone: see `follow`.
        """
        ...

    def follow(self, work: Waitable, span: Span | None) -> Waitable:
        """End the span when the work is done, by waiting for it here. Returns what the caller shall wait for instead of
        it: without a span the work itself."""
        ...
