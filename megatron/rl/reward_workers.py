"""Computes rewards in worker processes, so that a function that hangs, crashes or prints does not harm training.

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
from typing import NamedTuple

import megatron.rl.reward_process
from megatron.base.errors import shown
from megatron.base.log import get_logger
from megatron.rl.rewards import Reward, RewardBatch, RewardError, RewardInput, RewardSource

_PROGRAM = megatron.rl.reward_process.__name__
_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0  # for the imports of the function's file, on a busy machine
_logger = get_logger(__name__)


class _Worker:
    """A worker process. It starts, is then idle, and is busy while `number` is the number of an answer.

    `until` is the time limit, by the monotonic clock, of the start or the call.
    """

    def __init__(self, source: RewardSource) -> None:
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

    def call(self, number: int, answer: RewardInput, seconds: float) -> None:
        """Begins the computation of a reward."""
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


class _CallResult(NamedTuple):
    """The reward of the answer with this number. `ended`: the call failed because its worker ended."""

    number: int
    reward: Reward
    ended: bool = False


class RewardPool:
    """Worker processes that compute rewards. Use it in a `with` statement.

    The thread that makes the pool also calls it: Linux ends a worker with the thread that started it. No communication
    between ranks.
    """

    def __init__(
        self, source: RewardSource, *, workers: int, call_seconds: float, replacement: float | None = None
    ) -> None:
        """Starts the workers and waits until every one of them has imported the function.

        call_seconds: time limit of one call. replacement: the reward of an answer for which the function fails; None
        raises RewardError instead. Raises RewardError if the function cannot be used.
        """
        assert workers > 0 and call_seconds > 0, f"{workers} workers, {call_seconds} seconds"
        self._source, self._call_seconds, self._replacement = source, call_seconds, replacement
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(source))
            while not all(worker.ready for worker in self._workers):
                self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers at once."""
        while self._workers:
            self._workers.pop().kill()

    def score(self, answers: Sequence[RewardInput]) -> RewardBatch:
        """Returns the rewards of the answers, in their order.

        A call that takes longer than the limit is killed with its worker. A call whose worker ends is tried once more,
        since the system may have ended it for other reasons. Failures are replaced and counted, and a log line tells
        the first one; without a replacement the first one raises RewardError, which closes the pool.
        """
        rewards: list[Reward | None] = [None] * len(answers)
        waiting, repeated = deque(range(len(answers))), set[int]()
        left = len(answers)
        try:
            while left:
                for worker in self._workers:
                    if waiting and worker.ready and worker.number is None:
                        number = waiting.popleft()
                        worker.call(number, answers[number], self._call_seconds)
                for result in self._receive():
                    number, reward = result.number, result.reward
                    if result.ended and number not in repeated:
                        repeated.add(number)
                        waiting.appendleft(number)
                        continue
                    rewards[number] = reward if reward.failure is None else self._replaced(answers[number], reward)
                    left -= 1
        except BaseException:
            self.close()
            raise
        batch = RewardBatch(tuple(reward for reward in rewards if reward is not None))
        if batch.failures:
            number = next(n for n, reward in enumerate(batch.rewards) if reward.failure is not None)
            _logger.warning(
                "%d of %d rewards failed and count as %g; the first: %s",
                batch.failures,
                len(answers),
                self._replacement,
                self._fault(answers[number], str(batch.rewards[number].failure)),
            )
        return batch

    def _receive(self) -> list[_CallResult]:
        """Waits for a message or the next time limit, and returns the results of calls.

        Raises RewardError for a worker that cannot start.
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

    def _read(self, worker: _Worker) -> _CallResult | None:
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return self._replace(worker, ended=True)
        number, failure = worker.number, message.get("failure")
        if number is None:
            if failure is not None:
                raise RewardError(failure)
            worker.ready = True
            return None
        worker.number = None
        if failure is not None:
            return _CallResult(number, Reward(0.0, failure=failure))
        return _CallResult(number, Reward(message["score"], message["figures"]))

    def _replace(self, worker: _Worker, *, ended: bool) -> _CallResult:
        """Kills a worker, which has ended or takes too long, and starts another; returns the failure of its call.

        Raises RewardError for a worker that has not started.
        """
        number, end = worker.number, worker.kill()
        if number is None:
            self._workers.remove(worker)
            reason = f"its worker process {end}" if ended else f"it took longer than {_START_SECONDS:g} s"
            raise RewardError(f"{self._source}: the file cannot be imported: {reason}")
        self._workers[self._workers.index(worker)] = _Worker(self._source)
        late = f"the call took longer than {self._call_seconds:g} s (--rm-timeout)"
        return _CallResult(number, Reward(0.0, failure=f"its worker process {end}" if ended else late), ended)

    def _replaced(self, answer: RewardInput, reward: Reward) -> Reward:
        if self._replacement is None:
            raise RewardError(
                f"{self._fault(answer, str(reward.failure))}; correct the function, or give --rm-on-error a number "
                "that replaces failed rewards"
            )
        return Reward(self._replacement, failure=reward.failure)

    def _fault(self, answer: RewardInput, reason: str) -> str:
        # Chat templates begin every prompt with the same words.
        prompt = answer.prompt if answer.messages is None else answer.messages[-1]["content"]
        return f"{self._source} fails for the prompt {shown(prompt)}: {reason}"
