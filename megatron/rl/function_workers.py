"""Calls a function of the user in worker processes, so that one that hangs, crashes or prints does not harm training.

[Note: programs instead of multiprocessing]
Workers are programs of their own, not processes of the multiprocessing module: that module runs the main program of
training again in each worker, which imports torch. And they are not threads: a thread cannot be killed, and a regular
expression that backtracks for hours lets no other thread run.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import megatron.rl.function_process
from megatron.base.errors import shown
from megatron.base.log import get_logger
from megatron.rl.environments import EnvironmentSource
from megatron.rl.rewards import RewardSource
from megatron.rl.user_functions import AnsweredPrompt, FunctionError

_PROGRAM = megatron.rl.function_process.__name__
_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0  # for the imports of the function's file, on a busy machine
_logger = get_logger(__name__)


class _Worker:
    """A worker process. It starts, is then idle, and is busy while `number` is the number of an answer.

    `until` is the time limit, by the monotonic clock, of the start or the call.
    """

    def __init__(self, source: RewardSource | EnvironmentSource) -> None:
        self.connection, theirs = multiprocessing.connection.Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", _PROGRAM, str(descriptor), str(os.getpid()), os.getcwd()]
        # It imports what this process would. A current folder with another `megatron` must not come first.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        # In a session of its own, what the function starts can be killed with it.
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.ready = False
        self.number: int | None = None
        self.until = time.monotonic() + _START_SECONDS
        with suppress(OSError):  # the process has ended already, which is noticed when its answer is read
            self.connection.send(source)

    def call(self, number: int, answer: AnsweredPrompt, seconds: float) -> None:
        """Begins the call for an answer."""
        self.number, self.until = number, time.monotonic() + seconds
        with suppress(OSError):  # the process has ended while it was idle, which is noticed when its answer is read
            self.connection.send(answer)

    def kill(self) -> str:
        """Ends the process with all that it has started, and returns how it ended."""
        if self._process.returncode is None:  # otherwise another process may have its number
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"


class CallResult(NamedTuple):
    """The value that the function returned, or the reason why it failed."""

    value: Any = None
    failure: str | None = None


class _EndedCall(NamedTuple):
    """The result for the answer with this number. `ended`: the call failed because its worker ended."""

    number: int
    result: CallResult
    ended: bool = False


_Pool = TypeVar("_Pool", bound="FunctionPool")


class FunctionPool:
    """Worker processes that call a function. Use it in a `with` statement, or close it.

    The thread that makes the pool also calls it: Linux ends a worker with the thread that started it. No communication
    between ranks.
    """

    def __init__(
        self,
        source: RewardSource | EnvironmentSource,
        *,
        workers: int,
        call_seconds: float,
        replacement: float | None = None,
    ) -> None:
        """Starts the workers and waits until every one of them has imported the function.

        call_seconds: time limit of one call. replacement: the reward of an answer for which the function fails; None
        raises FunctionError instead. Raises FunctionError if the function cannot be used.
        """
        assert workers > 0 and call_seconds > 0, f"{workers} workers, {call_seconds} seconds"
        self._source, self._call_seconds, self.replacement = source, call_seconds, replacement
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(source))
            while not all(worker.ready for worker in self._workers):
                self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self: _Pool) -> _Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers at once."""
        while self._workers:
            self._workers.pop().kill()

    def call(self, answers: Sequence[AnsweredPrompt]) -> list[CallResult]:
        """Returns the results for the answers, in their order.

        A call that takes longer than the limit is killed with its worker. A call whose worker ends is tried once more,
        since the system may have ended it for other reasons. A log line counts failures and tells the first one;
        without a replacement the first one raises FunctionError, which closes the pool.
        """
        results: dict[int, CallResult] = {}
        waiting, repeated = deque(range(len(answers))), set[int]()
        try:
            while len(results) < len(answers):
                for worker in self._workers:
                    if waiting and worker.ready and worker.number is None:
                        number = waiting.popleft()
                        worker.call(number, answers[number], self._call_seconds)
                for call in self._receive():
                    if call.ended and call.number not in repeated:
                        repeated.add(call.number)
                        waiting.appendleft(call.number)
                        continue
                    if call.result.failure is not None and self.replacement is None:
                        raise FunctionError(
                            f"{self._fault(answers[call.number], call.result.failure)}; correct the function, or give "
                            "--rm-on-error a number that replaces failed rewards"
                        )
                    results[call.number] = call.result
        except BaseException:
            self.close()
            raise
        failures = [number for number in range(len(answers)) if results[number].failure is not None]
        if failures:
            _logger.warning(
                "%d of %d rewards failed and count as %g; the first: %s",
                len(failures),
                len(answers),
                self.replacement,
                self._fault(answers[failures[0]], str(results[failures[0]].failure)),
            )
        return [results[number] for number in range(len(answers))]

    def _receive(self) -> list[_EndedCall]:
        """Waits for a message or the next time limit, and returns the results of calls that have ended.

        Raises FunctionError for a worker that cannot start.
        """
        active = [worker for worker in self._workers if worker.number is not None or not worker.ready]
        seconds = max(0.0, min(worker.until for worker in active) - time.monotonic())
        readable = multiprocessing.connection.wait([worker.connection for worker in active], seconds)
        results = []
        for worker in active:
            if worker.connection in readable:
                result = self._read(worker)
            elif time.monotonic() >= worker.until:
                result = self._replace(worker, ended=False)
            else:
                continue
            if result is not None:
                results.append(result)
        return results

    def _read(self, worker: _Worker) -> _EndedCall | None:
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return self._replace(worker, ended=True)
        number, failure = worker.number, message.get("failure")
        if number is None:
            if failure is not None:
                raise FunctionError(failure)
            worker.ready = True
            return None
        worker.number = None
        if failure is not None:
            return _EndedCall(number, CallResult(failure=failure))
        return _EndedCall(number, CallResult(message["value"]))

    def _replace(self, worker: _Worker, *, ended: bool) -> _EndedCall:
        """Kills a worker, which has ended or takes too long, and starts another; returns the failure of its call.

        Raises FunctionError for a worker that has not started.
        """
        number, end = worker.number, worker.kill()
        if number is None:
            self._workers.remove(worker)
            reason = f"its worker process {end}" if ended else f"it took longer than {_START_SECONDS:g} s"
            raise FunctionError(f"{self._source}: the file cannot be imported: {reason}")
        self._workers[self._workers.index(worker)] = _Worker(self._source)
        late = f"the call took longer than {self._call_seconds:g} s (--rm-timeout)"
        return _EndedCall(number, CallResult(failure=f"its worker process {end}" if ended else late), ended)

    def _fault(self, answer: AnsweredPrompt, reason: str) -> str:
        # Chat templates begin every prompt with the same words.
        prompt = answer.prompt if answer.messages is None else answer.messages[-1]["content"]
        return f"{self._source} fails for the prompt {shown(prompt)}: {reason}"
