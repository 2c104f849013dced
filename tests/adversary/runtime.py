"""The state of the adversarial runtime of one process: agents, threads, the mode, and all work that is in flight."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from tests.adversary.memory import Agent, Clock, Memory, Race
from tests.adversary.watch import Watch

LATE, SHUFFLED = "late", "shuffled"
_CHANCE = 0.3  # that pending work is done at an opportunity


class Pending(Protocol):
    """Work that was submitted and is not over. must_be_waited_for: whether dropping it is a mistake."""

    must_be_waited_for: bool

    def nudge(self) -> None:
        """Do it now, if that cannot block."""
        ...

    def finish(self) -> None:
        """Block until it is done."""
        ...

    def described(self) -> str:
        """Its name."""
        ...


class Runtime:
    """See the package. Made by the main thread, whose kernels are the compute."""

    def __init__(self, mode: str, seed: int) -> None:
        self.memory, self.mode = Memory(), mode
        self.compute, self.host = Agent("compute"), Agent("the host")
        self.pending: dict[int, Pending] = {}
        self.steps: dict[tuple[str, str], int] = {}  # (stream, operation) -> how often it yields
        self._seed, self._random = seed, random.Random(seed)
        self._local = threading.local()
        self._main = threading.get_ident()

    def agent(self) -> Agent | None:
        """The agent that the calling thread acts for; None: compute and host code of the main thread."""
        found: Agent | None = getattr(self._local, "agent", None)
        if found is None and threading.get_ident() != self._main:
            found = self._local.agent = Agent(threading.current_thread().name)
        return found

    def agent_of(self, tensors: Sequence[Tensor]) -> Agent:
        """The agent of a kernel with these tensors. The main thread's host code is what has tensors of the host
        alone."""
        if (agent := self.agent()) is not None:
            return agent
        if tensors and all(self.memory.is_on_host(tensor) for tensor in tensors):
            return self.host
        self._queue_behind_host()
        return self.compute

    @contextlib.contextmanager
    def acting(self, agent: Agent) -> Iterator[None]:
        """The body's kernels, on this thread, are the agent's."""
        before = self.agent()
        self._local.agent = agent
        try:
            with self._watched():
                yield
        finally:
            self._local.agent = before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The main thread's kernels are seen in the body. At its end all work is over, or Race is raised."""
        with self._watched():
            yield
            self._close()

    def submitted(self, after: Sequence[object] | None) -> tuple[Clock, Clock]:
        """(what work that is submitted now begins behind, what the host code that submits it has done).

        The works in `after` are not included."""
        agent = self.agent()
        if agent is None:
            self._queue_behind_host()
            host = self.host.release()
            return (host if after is not None else self.compute.release()), host
        host = getattr(agent, "host_clock", None) or agent.release()
        return (host if after is not None else agent.release()), host

    def now(self) -> Clock:
        """All that is queued on the current stream."""
        agent = self.agent()
        if agent is not None:
            return agent.release()
        self._queue_behind_host()
        self.host.release()
        return self.compute.release()

    def order_behind(self, known: Clock, *, host: bool) -> None:
        """Order the compute of the caller, or its host code as well, behind work that is over."""
        agent = self.agent()
        if agent is not None:
            agent.join(known)
            return
        self.compute.join(known)
        if host:
            self.host.join(known)

    def host_waits_for_compute(self, agent: Agent) -> None:
        """After a kernel of `agent` whose result the host waits for."""
        if agent is self.compute:
            self.host.join(self.compute.release())

    def random_of(self, name: str) -> random.Random | None:
        """For the choices about one operation; None when nothing is shuffled."""
        return random.Random(f"{self._seed} {name}") if self.mode == SHUFFLED else None

    def opportunity(self) -> None:
        """Call where pending work may happen to be done: in the main thread, if it is not acting for another agent."""
        if self.mode != SHUFFLED or self.agent() is not None:
            return
        waiting = list(self.pending.values())
        self._random.shuffle(waiting)
        for each in waiting:
            if self._random.random() < _CHANCE:
                each.nudge()

    def _queue_behind_host(self) -> None:
        """Compute is queued by host code, after all that this did. What the host waited for, compute has waited for."""
        self.compute.clock[self.host.number] = self.host.clock[self.host.number]

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Modes belong to threads."""
        if getattr(self._local, "watched", False):
            yield
            return
        self._local.watched = True
        try:
            with Watch(self):
                yield
        finally:
            self._local.watched = False

    def _close(self) -> None:
        forgotten = [each.described() for each in self.pending.values() if each.must_be_waited_for]
        if forgotten:
            raise Race(f"nothing waited for {', '.join(sorted(set(forgotten)))}")
        while self.pending:
            next(iter(self.pending.values())).finish()
