"""The CPU's counterpart of a communication stream: a thread that carries jobs through beside compute.

[Note: jobs of a lane]
A job is a generator: it posts messages, yields their works, and goes on when all have arrived, perhaps to post more.
The first messages of a job are posted as soon as fewer than `in_flight` jobs are under way, in the order of submission,
which must be the same on all ranks; later ones at once. The thread waits for whatever was posted first. So the wire
always has work queued, staging memory is bounded, and the compute thread only submits and, much later, waits. No two
ranks can wait for each other: what a rank waits for depends only on jobs that were submitted before.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Generator
from typing import Any

_SWITCH_SECONDS = 0.0002
_IDLE_SECONDS = 10.0

Steps = Generator[list[Any], None, None]


class Job:
    """Work submitted to a lane. `wait` blocks the calling thread; it raises what the job raised."""

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._works: list[Any] = []
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when the job is done. Raises RuntimeError when its transport failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    def advance(self) -> bool:
        """Wait for the messages posted so far and run to the next ones; False when the job is done or has failed."""
        assert self._steps is not None
        try:
            for work in self._works:
                work.wait()
            self._works = next(self._steps)
            return True
        except StopIteration:
            pass
        except BaseException as error:  # whoever waits for the job gets to see it
            self._error = error
        self._steps, self._works = None, []  # frees what the generator held
        self._done.set()
        return False


class Lane:
    """Carries jobs through; see the note above. Its thread starts with a job and ends when there are none for a while."""

    def __init__(self, name: str, *, in_flight: int) -> None:
        self._name, self._in_flight = name, in_flight
        self._under_way = 0
        self._posted: deque[Job] = deque()
        self._queued: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, steps: Steps) -> Job:
        """Start a job, or queue it behind those under way."""
        job = Job(steps)
        with self._changed:
            self._queued.append(job)
            self._post_next()
            if self._posted and self._thread is None:
                # A thread that asks for the interpreter waits this long while another computes in Python, 5 ms by
                # default: as long as a bucket travels.
                sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return job

    def _post_next(self) -> None:
        while self._queued and self._under_way < self._in_flight:
            job = self._queued.popleft()
            if job.advance():
                self._under_way += 1
                self._posted.append(job)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._posted), _IDLE_SECONDS):
                    self._thread = None
                    return
                job = self._posted.popleft()
            goes_on = job.advance()
            with self._changed:
                if goes_on:
                    self._posted.append(job)
                else:
                    self._under_way -= 1
                    self._post_next()
