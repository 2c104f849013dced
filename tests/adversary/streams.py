"""Streams whose operations are done as late as their events allow, or in random order."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron.core.streams.stream import Operation, Waitable, Work
from tests.adversary.memory import Agent, Clock, Race
from tests.adversary.runtime import Runtime
from tests.adversary.transfers import Transfer


class Marked:
    """All compute before a call of `Streams.mark`, which is over on the CPU."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._known = runtime, runtime.now()

    def wait(self) -> None:
        """See Work."""
        self._runtime.order_behind(self._known, host=False)

    def is_completed(self) -> bool:
        """See Work."""
        return True

    def synchronize(self) -> None:
        """See Work."""
        self._runtime.order_behind(self._known, host=True)


class _Submitted(Agent, abc.ABC):
    """The common part of all operations of streams; a Work."""

    def __init__(
        self,
        runtime: Runtime,
        stream: AdversarialStream,
        name: str,
        after: Sequence[Waitable] | None,
        keep: Sequence[Tensor],
    ) -> None:
        clock, host = runtime.submitted(after)
        super().__init__(f"{stream.name}: {name}", clock)
        # What host code that runs within it has done before: on CUDA the caller's, at submission; on a thread its own.
        self.host_clock: Clock | None = None if stream.is_host else host
        self._runtime, self._stream, self._after, self._keep = runtime, stream, tuple(after or ()), tuple(keep)
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._end: Clock = {}
        runtime.pending[self.number] = self

    must_be_waited_for = False

    def wait(self) -> None:
        """See Work."""
        self._wait(host=False)

    def synchronize(self) -> None:
        """See Work."""
        self._wait(host=True)

    def is_completed(self) -> bool:
        """See Work."""
        self._runtime.opportunity()
        return self._over.is_set()

    def described(self) -> str:
        """See Pending."""
        return self.title.text

    @abc.abstractmethod
    def finish(self) -> None:
        """See Pending."""

    def _wait(self, *, host: bool) -> None:
        self._runtime.opportunity()
        self.finish()
        self._runtime.pending.pop(self.number, None)
        if self._error is not None:
            raise self._error
        touched, self.touched = self.touched, {}
        if not self._stream.is_host and any(storage.expired() for storage in touched.values()):
            raise Race(f"a tensor of {self.title.text} was freed before it was waited for, and is not in its `keep`")
        self._keep = ()
        # Whoever waits for a job of the host is blocked, on CUDA as well.
        self._runtime.order_behind(self._end, host=host or self._stream.is_host)

    def _finished(self, error: BaseException | None) -> None:
        self._error, self._after, self._end = error, (), self.release()
        if not self.must_be_waited_for:
            self._runtime.pending.pop(self.number, None)
        self._over.set()


class Function(_Submitted):
    """A function of `Stream.run`: run by whichever thread first needs it."""

    def __init__(
        self,
        runtime: Runtime,
        stream: AdversarialStream,
        name: str,
        function: Callable[[], None],
        after: Sequence[Waitable] | None,
        keep: Sequence[Tensor],
        before: Function | None,
    ) -> None:
        """before: the function that runs before it on the same thread, if there is such an order."""
        # Another thread may nudge it as soon as the stream knows it.
        self._function: Callable[[], None] | None = function
        self._before, self._lock = before, threading.RLock()
        super().__init__(runtime, stream, name, after, keep)

    def finish(self) -> None:
        """See Pending."""
        with self._lock:
            if self._over.is_set():
                return
            error: BaseException | None = None
            try:
                if self._before is not None:
                    self._before.finish()
                    self.join(self._before._end)
                with self._runtime.acting(self):
                    for work in self._after:
                        work.wait()
                    assert self._function is not None
                    self._function()
            except BaseException as raised:
                error = raised
            self._function = self._before = None
            self._finished(error)

    def nudge(self) -> None:
        """See Pending."""
        if self._cannot_block():
            self.finish()

    def _cannot_block(self) -> bool:
        behind = [*self._after, *([] if self._before is None else [self._before])]
        return self._over.is_set() or all(_is_over_soon(work) for work in behind)


def _is_over_soon(work: Waitable) -> bool:
    if isinstance(work, Function):
        return work._cannot_block()
    return work._over.is_set() if isinstance(work, Communication) else isinstance(work, Marked)


class Communication(_Submitted):
    """An operation of `Stream.submit`, with a thread of its own."""

    must_be_waited_for = True

    def __init__(
        self,
        runtime: Runtime,
        stream: AdversarialStream,
        name: str,
        operation: Operation,
        after: Sequence[Waitable] | None,
        keep: Sequence[Tensor],
        before: Communication | None,
    ) -> None:
        """before: the one that was submitted to the stream before it."""
        super().__init__(runtime, stream, name, after, keep)
        self._operation: Operation | None = operation
        self._before, self._key = before, (stream.name, name)
        self._demanded = threading.Event()
        self._steps: list[Clock] = []  # what is over after each step
        self._stepped = threading.Condition()
        self._pending: list[Waitable] = []
        goes_on = True
        if after is None:
            with runtime.acting(self):
                goes_on = self._step()
        else:
            self._pending = list(after)
            self._count()
        if goes_on:
            threading.Thread(target=self._carry_out, name=self.title.text, daemon=True).start()

    def finish(self) -> None:
        """See Pending."""
        self._demanded.set()
        self._over.wait()

    def nudge(self) -> None:
        """See Pending."""
        self._demanded.set()

    def _carry_out(self) -> None:
        with self._runtime.acting(self):
            goes_on = True
            while goes_on:
                goes_on = self._step(self._arrived)

    def _step(self, prepare: Callable[[], None] = lambda: None) -> bool:
        """Take the next step; False when the operation is over or has failed."""
        error: BaseException | None = None
        try:
            prepare()
            assert self._operation is not None
            self._pending = list(next(self._operation))
            self._count()
            return True
        except StopIteration:
            self._runtime.steps[self._key] = len(self._steps)
        except BaseException as raised:
            error = raised
        self._operation, self._before, self._pending = None, None, []
        with self._stepped:
            self._finished(error)
            self._stepped.notify_all()
        return False

    def _arrived(self) -> None:
        """Block until the next step may be taken, and has to be if it is the last one."""
        for work in self._pending:
            if isinstance(work, Transfer):
                work.arrive()
        if len(self._steps) == self._runtime.steps.get(self._key):
            self._demanded.wait()
        self._follow_earlier()
        chance = self._runtime.random_of(f"{self.title.text} {len(self._steps)}")
        if chance is not None:
            chance.shuffle(self._pending)
        for work in self._pending:
            work.wait()

    def _follow_earlier(self) -> None:
        """The operation before this one takes its n-th step first."""
        before, number = self._before, len(self._steps)
        if before is None:
            return
        if self._runtime.steps.get(before._key, number + 1) <= number:
            before._demanded.set()
        with before._stepped:
            before._stepped.wait_for(lambda: before._over.is_set() or len(before._steps) > number)
            self.join(before._steps[number] if number < len(before._steps) else before._end)

    def _count(self) -> None:
        with self._stepped:
            self._steps.append(self.release())
            self._stepped.notify_all()


class AdversarialStream:
    """See Stream; the notes of the package say in which order things happen."""

    def __init__(self, runtime: Runtime, name: str, *, is_host: bool) -> None:
        self.name, self.is_host, self._runtime = name, is_host, runtime
        self._last: Communication | None = None
        self._last_job: Function | None = None
        self._lock = threading.RLock()

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
        with self._lock:
            self._last = Communication(self._runtime, self, name, operation, after, keep, self._last)
            work = self._last
        self._runtime.opportunity()
        return work

    def run(
        self,
        function: Callable[[], None],
        name: str,
        *,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""
        with self._lock:
            work = Function(self._runtime, self, name, function, after, keep, self._last_job)
            if self.is_host:
                self._last_job = work
        self._runtime.opportunity()
        return work

    def begin(self, name: str) -> None:
        """Nothing is drawn."""

    def follow(self, work: Waitable, span: None) -> Waitable:
        """See Stream."""
        return work
