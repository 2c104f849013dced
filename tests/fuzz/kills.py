"""Runs that save, whose processes are killed at random moments, most of them in the middle of a save: whatever was
killed goes on from a whole checkpoint with the numbers of a run that nobody disturbed, and leaves whole exports only.

By hand: `python -m tests.fuzz.kills --seed 1 --cases 100`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron.command_line.entry import run_of
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.store import verify
from megatron.training.main import main as train
from tests import file_events
from tests.e2e.helpers.launch import Job, Torchrun, run, start
from tests.e2e.helpers.runs import MOCK, figures, flags
from tests.fuzz.campaign import Campaign, Failure, main

STEPS = 6
LIMIT_SECONDS = 30.0  # for ranks to end after another one was killed
RUN_SECONDS = 90.0
LAYOUTS = {
    "one rank": (1, {}),
    "dp": (2, {}),
    "dp, shared optimizer": (2, {"--use-distributed-optimizer": None}),
    "dp, shared parameters": (2, {"--data-parallel-sharding-strategy": "optim_grads_params"}),
    "tp": (2, {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}),
    "pp": (2, {"--pipeline-model-parallel-size": 2, "--pipeline-schedule": "zb-h1", "--micro-batch-size": 2}),
}
# Ways to save, by the flags of the program.
LOCAL: dict[str, object] = {"--non-persistent-save-interval": 1, "--non-persistent-ckpt-type": "local"}
SAVES: dict[str, dict[str, object]] = {
    "plain": {},
    "async": {"--async-save": None},
    "local": LOCAL,
    "local, async": {**LOCAL, "--async-save": None},
}
VICTIMS = ("all", "one", "launcher")


@dataclass(frozen=True)
class Kill:
    """The victim is killed `delay` seconds after its rank `rank` has begun share `at` of what a whole run does to
    files.

    A launcher's ranks end by themselves, and so does the other rank of one that is lost.
    """

    victim: str
    rank: int
    at: float
    delay: float


@dataclass(frozen=True)
class Case:
    """A run and its kills, one after the other."""

    layout: str
    interval: int
    retain: int | None
    export: bool
    bf16: bool
    save: str
    kills: tuple[Kill, ...]


def draw(rng: random.Random) -> Case:
    """One or two ranks, one to three kills."""
    layout = rng.choice(list(LAYOUTS))

    def kill() -> Kill:
        victim = rng.choices(VICTIMS, weights=(16, 4, 1))[0]
        delay = rng.choice([0.0, rng.uniform(0, 1e-3), rng.uniform(0, 1e-2)])
        return Kill(victim, rng.randrange(LAYOUTS[layout][0]), round(rng.random(), 3), round(delay, 5))

    return Case(
        layout,
        interval=rng.choice([1, 2, 3, 4]),
        retain=rng.choice([None, 1, 1, 2]),
        export=rng.random() < 0.7,
        bf16=rng.random() < 0.3,
        save=rng.choice(list(SAVES)),
        kills=tuple(kill() for _ in range(rng.choice([1, 1, 2, 3]))),
    )


def simpler(case: Case) -> Iterable[Case]:
    """Fewer kills, one rank, no export, fewer options."""
    for i in range(len(case.kills)):
        if len(case.kills) > 1:
            yield dataclasses.replace(case, kills=case.kills[:i] + case.kills[i + 1 :])
    if LAYOUTS[case.layout][0] > 1:
        kills = tuple(dataclasses.replace(kill, rank=0) for kill in case.kills)
        yield dataclasses.replace(case, layout="one rank", kills=kills)
    for changes in ({"export": False}, {"bf16": False}, {"retain": None}, {"save": "plain"}):
        if any(getattr(case, name) != value for name, value in changes.items()):
            yield dataclasses.replace(case, **changes)
    for i, kill in enumerate(case.kills):
        if kill.delay or kill.victim != "all":
            plain = dataclasses.replace(kill, delay=0.0, victim="all")
            yield dataclasses.replace(case, kills=(*case.kills[:i], plain, *case.kills[i + 1 :]))


def check(case: Case, folder: Path) -> str:
    """Kill, look at what is left, go on; then to the end."""
    world, expected = LAYOUTS[case.layout][0], undisturbed(dataclasses.replace(case, kills=()))
    done: dict[int, list[str]] = {}
    killed = 0
    for number, kill in enumerate(case.kills):
        moment = 1 + int(kill.at * expected.moments[kill.rank])
        killed += killed_run(case, kill, moment, folder, folder / f"log{number}", done)
        check_what_is_left(case, folder, expected)
    ended = run(run_flags(case, folder), folder / "log", world, timeout=RUN_SECONDS)
    if any(ended.codes):
        raise Failure(f"the last start ended with {ended.codes} after {killed} kills\n{ended.text[-4000:]}")
    take_over(done, ended.stdout[0])
    if done != expected.figures:
        raise Failure(f"other numbers than undisturbed: {done} instead of {expected.figures}")
    check_what_is_left(case, folder, expected)
    saved, exported = names(folder / "save"), names(folder / "hf")
    if not figures(ended.stdout[0]):  # what a killed save did not delete goes with the next one, and there was none
        saved = [name for name in saved if name in expected.checkpoints]
    if saved != expected.checkpoints or exported != list(expected.exports):
        raise Failure(f"left are {saved} and exports {exported}")
    return f"went on after {killed} kill{'' if killed == 1 else 's'}"


def save_flags(save: str, disk: Path) -> dict[str, object]:
    """Of SAVES. disk: of the host, for local checkpoints."""
    place = {"--non-persistent-local-ckpt-dir": disk} if "local" in save else {}
    return {**SAVES[save], **place}


def run_flags(case: Case, folder: Path) -> list[str]:
    """Of the training program: from where the newest checkpoint is."""
    save = folder / "save"
    options = {"--train-iters": STEPS, "--save": save, "--load": save, "--save-interval": case.interval}
    if case.retain is not None:
        options["--save-retain"] = case.retain
    if case.export:
        options["--save-hf"] = folder / "hf"
    if case.bf16:
        options["--bf16"] = None
    saves = save_flags(case.save, folder / "local")
    return flags(MOCK, {"--untie-embeddings-and-output-weights": None}, options, LAYOUTS[case.layout][1], saves)


@dataclass(frozen=True)
class Whole:
    """What the undisturbed run printed and left. moments: of each rank, things done to files. exports: name ->
    files."""

    figures: dict[int, list[str]]
    moments: list[int]
    checkpoints: list[str]
    exports: dict[str, dict[str, bytes]]


@functools.cache
def undisturbed(case: Case) -> Whole:
    """The run that nobody kills."""
    with tempfile.TemporaryDirectory(prefix="fuzz-kills-") as name:
        folder, world = Path(name), LAYOUTS[case.layout][0]
        env = {"FAULTY_FOLDER": folder, "FAULTY_RANK": -1}
        done = run(run_flags(case, folder), folder / "log", world, "tests.fuzz.kills:counting", env, RUN_SECONDS)
        assert not any(done.codes), done.text
        moments = [int((folder / f"moments{rank}").read_text()) for rank in range(world)]
        return Whole(figures(done.stdout[0]), moments, names(folder / "save"), exports(folder / "hf"))


def killed_run(case: Case, kill: Kill, moment: int, folder: Path, log: Path, done: dict[int, list[str]]) -> int:
    """One start that is killed; 0 when it had nothing left to do at that moment, else 1."""
    argv, world = run_flags(case, folder), LAYOUTS[case.layout][0]
    env = {"FAULTY_FOLDER": folder, "FAULTY_RANK": kill.rank, "FAULTY_MOMENT": moment, "FAULTY_DELAY": kill.delay}
    if kill.victim == "launcher":
        ended = kill_launcher(Torchrun(argv, log, world), kill, folder)
        take_over(done, (log / "0.out").read_text())
        return ended
    job = start(argv, log, world, "tests.fuzz.kills:killing", env)
    while not job.codes:
        job.ended()
        time.sleep(0.01)
    was_killed = job.codes.get(kill.rank) == -signal.SIGKILL
    if kill.victim == "all":
        job.kill()
    codes = wait(job).values()
    if not was_killed and any(codes):
        raise Failure(f"a start that was not killed ended with {list(codes)}\n{job.text(0, 'err')}")
    take_over(done, job.text())
    return int(was_killed)


def wait(job: Job) -> dict[int, int]:
    """Exit codes of all ranks: those that lost another one end, too."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not job.ended():
        if time.monotonic() > deadline:
            raise Failure(f"ranks {job.kill()} still ran {LIMIT_SECONDS:g} s after another one was killed")
        time.sleep(0.05)
    return job.codes


def kill_launcher(job: Torchrun, kill: Kill, folder: Path) -> int:
    """Kill torchrun some time after its job's first checkpoint; its ranks must end before the next start."""
    deadline = time.monotonic() + RUN_SECONDS
    while job.process.poll() is None and not list((folder / "save").glob("iter_*")):
        if time.monotonic() > deadline:
            raise Failure(f"no checkpoint within {RUN_SECONDS:g} s under torchrun\n{job.text('err')}")
        time.sleep(0.01)
    time.sleep(kill.at / 4)
    ranks = psutil.Process(job.process.pid).children(recursive=True) if job.process.poll() is None else []
    job.process.kill()
    job.process.wait()
    _, left = psutil.wait_procs(ranks, LIMIT_SECONDS)
    for process in left:
        process.kill()
    if left:
        raise Failure(f"{len(left)} ranks still ran {LIMIT_SECONDS:g} s after torchrun was killed")
    return int(bool(ranks))


def check_what_is_left(case: Case, folder: Path, expected: Whole) -> None:
    """The newest checkpoint is whole, and so is what has an export's name: it is the undisturbed run's, byte for
    byte."""
    newest = find(folder / "save", None)
    if newest is not None:
        verify(newest)
    for name, files in exports(folder / "hf").items():
        if files != expected.exports.get(name):
            raise Failure(f"export {name} holds {sorted(files)}, not the undisturbed run's")


def names(root: Path) -> list[str]:
    """Of checkpoints or exports, and of what should have been cleared away."""
    return sorted(path.name for path in root.glob("*iter_*"))


def exports(root: Path) -> dict[str, dict[str, bytes]]:
    """Of every export its files."""
    found = sorted(root.glob("iter_*"))
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in found}


def take_over(done: dict[int, list[str]], stdout: str) -> None:
    """Add a start's losses. Raises Failure when a step that was taken before prints something else."""
    for step, values in figures(stdout).items():
        if done.setdefault(step, values) != values:
            raise Failure(f"step {step} printed {done[step]}, and {values} when it was taken again")


def killing(argv: list[str]) -> None:
    """A driver: rank FAULTY_RANK dies FAULTY_DELAY seconds after its FAULTY_MOMENT-th deed."""
    moment, delay = int(os.environ["FAULTY_MOMENT"]), float(os.environ["FAULTY_DELAY"])

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def at(number: int) -> None:
        if number == moment:
            threading.Timer(delay, die).start() if delay else die()

    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        _watch(at)
    train(run_of(argv, description="test"))


def counting(argv: list[str]) -> None:
    """A driver: every rank writes down how many deeds a kill can hit."""
    counts = [0]
    _watch(counts.append)
    train(run_of(argv, description="test"))
    (Path(os.environ["FAULTY_FOLDER"]) / f"moments{os.environ['RANK']}").write_text(str(counts[-1]))


def _watch(call: Callable[[int], None]) -> None:
    """All but the heartbeat's files, which depend on time."""
    folder = Path(os.environ["FAULTY_FOLDER"])
    file_events.on_each([folder / "save", folder / "hf"], call, but=[folder / "save" / "heartbeat"])


CAMPAIGN = Campaign(
    "kills",
    draw,
    check,
    simpler,
    lambda case: f"python -c 'from tests.fuzz.kills import *; print(check({case!r}, Path(tempfile.mkdtemp())))'",
)

if __name__ == "__main__":
    main(CAMPAIGN)
