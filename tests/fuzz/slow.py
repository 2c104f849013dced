"""Runs in which one rank, its disk or a link becomes slow, or a rank stops: the log names the right one, nobody else
before it, and nothing in a run that nobody disturbs.

By hand: `python -m tests.fuzz.slow --seed 1 --cases 40`. The links of emulated hosts need root:
`python -m tests.fuzz.slow --links 20`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster import job as on_hosts
from benchmarks.cluster.hosts import Cluster
from megatron.command_line.entry import run_of
from megatron.core.dist_checkpointing import storage
from megatron.core.models.gpt import GPTModel
from megatron.training import main as program
from megatron.training import stragglers
from megatron.training.batch import BatchReader
from tests.e2e.helpers.launch import Job, start
from tests.e2e.helpers.runs import MOCK, flags
from tests.fuzz.campaign import Campaign, Failure, main

LIMIT_SECONDS = 60.0  # from the fault to its name
QUIET_STEPS = 600  # of a run that nobody disturbs
SCALE = 0.5  # of the seconds between samples, so that a case is short
RELATIVE = 2.0  # the shortest fault, as a multiple of the usual time between two calls of what is slowed
# Variables of a worker. The fault begins when so many calls have been made and so many seconds have passed.
WHEN, CALLS = "SLOW_AFTER", "SLOW_CALLS"
KIND, VICTIM, SECONDS = "SLOW_KIND", "SLOW_RANK", "SLOW_SECONDS"
BEGINS = "slow: begins"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"--use-distributed-optimizer": None},
    "tp": {"--tensor-model-parallel-size": 2},
    "pp": {"--pipeline-model-parallel-size": 2, "--micro-batch-size": 2},
}
MODEL = {
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--seq-length": 64,
    "--train-iters": 1000000,
    "--lr-decay-style": "constant",
    "--log-straggler": None,
    "--log-interval": 20,
}
# The words of the log about rank {} by kind. A stopped rank is named by the report of a hang.
SAYS = {
    "sleep": "rank {} on \\S+ computes slowly",
    "busy": "rank {} on \\S+ computes slowly",
    "input": "rank {} on \\S+ reads its samples slowly",
    "save": "rank {} on \\S+ wrote its files of a checkpoint slowly",
    "stuck": "no progress .*; rank {} on \\S+: computing",
    "frozen": "no progress .*; rank {} on \\S+: it is silent",
}
WARNING = re.compile(r"slowly|links? .* slow|no progress")


@dataclass(frozen=True)
class Case:
    """A fault of rank `victim` that makes each computation, read or file `seconds` longer; kind "none" is no fault."""

    layout: str
    kind: str
    victim: int
    seconds: float


def draw(rng: random.Random) -> Case:
    """Each kind as often as another."""
    kind = rng.choice([*SAYS, "none"])
    layout = rng.choice(list(LAYOUTS) if kind != "save" else ["dp"])
    victim = 0 if kind == "input" and layout == "tp" else rng.randrange(2)
    seconds = {"sleep": 0.05, "busy": 0.05, "input": 0.05, "save": 1.5}.get(kind, 0.0)
    return Case(layout, kind, victim, round(seconds * rng.uniform(1, 4), 3))


def simpler(case: Case) -> Iterable[Case]:
    """Without a layout of several parts."""
    if case.layout != "dp":
        yield dataclasses.replace(case, layout="dp")


def check(case: Case, folder: Path) -> str:
    """Waits for the name of the victim, or for the end of a quiet run."""
    options = MODEL | LAYOUTS[case.layout]
    if case.kind == "save":
        options |= {"--save": folder / "run", "--save-interval": 100, "--save-retain-interval": 100000}
    if case.kind == "none":
        options |= {"--train-iters": QUIET_STEPS}
    # A stage of one rank, and a limit, have to know what is usual before the fault begins.
    calls = {"save": 2}.get(case.kind, 120 if case.layout == "pp" else 30)
    fault = {
        CALLS: calls,
        WHEN: 8.0 if case.layout == "pp" else 2.0,
        KIND: case.kind,
        VICTIM: case.victim,
        SECONDS: case.seconds,
    }
    job = start(flags(MOCK, options), folder / "log", 2, driver="tests.fuzz.slow:slowed", env=fault)
    try:
        if case.kind == "none":
            text = "".join(job.wait(timeout=120).stdout)
            expect_names(text, [])
            return "quiet"
        job.wait_for(BEGINS, rank=case.victim)
        began = time.monotonic()
        if case.kind == "frozen":
            os.kill(job.pids[case.victim], signal.SIGSTOP)
        pattern = SAYS[case.kind].format(case.victim)
        if (case.kind, case.victim) == ("frozen", 0):  # rank 0 is the store here, and torchrun's agent elsewhere
            pattern = "no progress .*; the job's store does not answer"
        text = wait_for(lambda: all_text(job), pattern)
        expect_names(text, [pattern])
        return f"{case.kind} named in {10 * int((time.monotonic() - began + 10) / 10)} s"
    finally:
        job.kill()


def all_text(job: Job) -> str:
    """Returns the output of the ranks so far."""
    return "\n".join(job.text(rank) for rank in range(2))


def wait_for(read: Callable[[], str], pattern: str) -> str:
    """Waits until the text holds the pattern and returns it. Raises Failure."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not re.search(pattern, text := read()):
        if time.monotonic() > deadline:
            raise Failure(f"nobody was named as {pattern!r}\n{text[-6000:]}")
        time.sleep(0.05)
    return text


def expect_names(text: str, patterns: Sequence[str]) -> None:
    """Raises Failure if a warning names anything else."""
    for line in text.splitlines():
        if WARNING.search(line) and not any(re.search(pattern, line) for pattern in patterns):
            raise Failure(f"the log names somebody else: {line}")


def slowed(argv: Sequence[str]) -> None:
    """Runs the program with the fault that the variables describe."""
    kind, seconds = os.environ[KIND], float(os.environ[SECONDS])
    stragglers.SAMPLE_SECONDS *= SCALE  # type: ignore[misc]
    stragglers.SUSPICIOUS_SECONDS *= SCALE  # type: ignore[misc]
    if os.environ["RANK"] == os.environ[VICTIM] and kind != "none":
        due = _Due(float(os.environ[WHEN]), int(os.environ[CALLS]))
        work = _work(kind)
        owner, name = {
            "input": (BatchReader, "_next"),
            "save": (storage, "write_tensor_file"),
        }.get(kind, (GPTModel, "forward"))
        plain = getattr(owner, name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            if due():
                # On a busy machine the usual time between two calls is longer than the fault of an idle one.
                work(seconds if kind == "save" else max(seconds, RELATIVE * due.usual))
            return plain(*arguments, **keywords)

        setattr(owner, name, called)
    program.main(run_of(argv, description="test"))


class _Due:
    """True from some seconds and calls on; says so once. usual: seconds between the calls before."""

    def __init__(self, seconds: float, least: int) -> None:
        self._seconds, self._least = seconds, least
        self._first, self._calls, self.usual = 0.0, 0, 0.0

    def __call__(self) -> bool:
        self._first = self._first or time.monotonic()
        elapsed = time.monotonic() - self._first
        if self.usual:
            return True
        if elapsed <= self._seconds or self._calls < self._least:
            self._calls += 1
            return False
        self.usual = elapsed / self._calls
        print(BEGINS, flush=True)
        return True


def _work(kind: str) -> Callable[[float], None]:
    def busy(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    if kind == "stuck":
        return lambda seconds: time.sleep(1000)
    return busy if kind == "busy" else time.sleep


# Links, and slow ranks of emulated hosts


def links(cases: int) -> int:
    """Runs cases on emulated hosts and prints a line for each. Returns the number of those that failed."""
    failed = 0
    for number in range(cases):
        rng = random.Random(f"links:{number}")
        hosts, kind = rng.choice([2, 3]), ["link", "link", "throttled"][number % 3]
        victim, factor = rng.randrange(hosts), rng.uniform(4, 8)
        began = time.monotonic()
        try:
            seconds = slow_link(hosts, kind, victim, factor)
            word = f"named in {seconds:.0f} s"
        except Failure as failure:
            failed += 1
            word = f"FAILED: {failure}"
        line = f"case {number}: {hosts} hosts, {kind} of host {victim}, {factor:.1f} times: {word}"
        print(f"{line} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{cases - failed} of {cases} named correctly")
    return failed


def slow_link(hosts: int, kind: str, victim: int, factor: float) -> float:
    """Slows a link, or the rank of a host, in a run on emulated hosts. Returns the seconds to its name."""
    rate = 400.0
    with Cluster(hosts, rate) as cluster:
        quick = ["--log-straggler", "--log-interval", "5"]
        with on_hosts.Job(cluster, sys.executable, quick, iterations=10**6, timeout=300) as job:

            def text() -> str:
                return "\n".join(line for _, line in job.ranks[0].lines)

            job.wait_for("iteration       30/", 120)
            while text().count("elapsed time") < 12:  # until the first samples are taken
                time.sleep(0.1)
            expect_names(text(), [])
            began = time.monotonic()
            pattern = f"rank {victim} on \\S+ computes slowly"
            if kind == "link":
                cluster.set_rate(rate / factor, [victim])
                shared = f"the links of rank {victim} on \\S+ are slow"
                pattern = shared if hosts > 2 else "the link between rank 0 on \\S+ and rank 1 on \\S+ is slow"
            with throttled(job.ranks[victim].agent.pid) if kind == "throttled" else contextlib.nullcontext():
                expect_names(wait_for(text, pattern), [pattern])
                return time.monotonic() - began


@contextlib.contextmanager
def throttled(agent: int) -> Iterator[None]:
    """Lets the rank below an agent run for a fifth of the time only."""
    code = (
        "import os,signal,sys,time\n"
        "while True:\n"
        "  os.kill(int(sys.argv[1]),signal.SIGSTOP);time.sleep(0.08);"
        "os.kill(int(sys.argv[1]),signal.SIGCONT);time.sleep(0.02)"
    )
    (rank, *_) = psutil.Process(agent).children()
    controller = psutil.Popen([sys.executable, "-c", code, str(rank.pid)])
    try:
        yield
    finally:
        controller.kill()
        controller.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()


CAMPAIGN = Campaign("slow", draw, check, simpler, lambda case: f"tests.fuzz.slow.check({case}, Path('/tmp/slow'))")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--links"]:
        sys.exit(links(int(sys.argv[2])) > 0)
    main(CAMPAIGN)
