"""Jobs under `torchrun --max-restarts`, on one host or on two emulated ones, whose ranks are killed at random moments.
Every job must heal, and print the losses of a job that nobody disturbed. `elastic` loses whole hosts.

By hand: `python -m tests.fuzz.restarts --seed 1 --cases 30`. Two hosts are network namespaces, and need root and
iproute2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cluster.hosts import Cluster, require_root
from tests.e2e.helpers import launch
from tests.e2e.helpers.launch import ROOT
from tests.e2e.helpers.runs import MOCK, figures, flags
from tests.fuzz.campaign import Campaign, Failure, main
from tests.pool import free_port

MAX_RESTARTS = 3
LIMIT_SECONDS = 240.0
RATE = 1000.0  # Mbit/s of an emulated link


@dataclass(frozen=True)
class Case:
    """Ranks are spread over the hosts. kills: (seconds since the job's start or since the kill before, which rank)."""

    hosts: int
    ranks: int
    kills: tuple[tuple[float, int], ...]
    tensor_parallel: bool = False


def draw(rng: random.Random) -> Case:
    """Two or four ranks, one to three kills."""
    hosts = rng.choice([1, 2])
    ranks = rng.choice([2, 2, 4])
    kills = tuple((round(rng.uniform(1.0, 14.0), 2), rng.randrange(ranks)) for _ in range(rng.choice([1, 1, 2, 3])))
    return Case(hosts, ranks, kills, rng.random() < 0.5)


def simpler(case: Case) -> Iterable[Case]:
    """Fewer kills, one host, two ranks, no tensor parallelism."""
    for i in range(len(case.kills)):
        if len(case.kills) > 1:
            yield dataclasses.replace(case, kills=case.kills[:i] + case.kills[i + 1 :])
    if case.hosts > 1:
        yield dataclasses.replace(case, hosts=1)
    if case.ranks > 2:
        yield dataclasses.replace(case, ranks=2, kills=tuple((at, rank % 2) for at, rank in case.kills))
    if case.tensor_parallel:
        yield dataclasses.replace(case, tensor_parallel=False)


def check(case: Case, folder: Path) -> str:
    """Run the job and kill its ranks."""
    if case.hosts > 1:
        require_root()
    with hosts(case.hosts) as cluster:
        agents = [start(case, cluster, host, folder) for host in range(case.hosts)]
        try:
            began = time.monotonic()
            killed = sum(kill_later(agents, delay, rank) for delay, rank in case.kills)
            for agent in agents:
                agent.wait(max(1.0, began + LIMIT_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            raise Failure(f"the job still ran after {LIMIT_SECONDS:g} s\n{_texts(folder)}") from late
        finally:
            for agent in agents:
                end(agent)
    codes = [agent.returncode for agent in agents]
    if any(codes):
        raise Failure(f"torchrun ended with {codes} after {killed} kills\n{_texts(folder)}")
    expected, got = undisturbed(dataclasses.replace(case, hosts=1, kills=())), losses(folder)
    if got != expected:
        other = sorted(step for step in expected if got.get(step) != expected[step])
        raise Failure(f"other losses in steps {other[:5]}: {[got.get(s) for s in other[:2]]} after {killed} kills")
    return f"healed from {killed} kills on {case.hosts} host{'s' if case.hosts > 1 else ''}"


def run_flags(case: Case, folder: Path) -> list[str]:
    """Of the training program: 60 steps, a checkpoint every five, from where the last one is."""
    save = folder / "save"
    saving = {"--train-iters": 60, "--micro-batch-size": 2, "--save": save, "--load": save, "--save-interval": 5}
    run = flags(MOCK, saving)
    return run + (["--tensor-model-parallel-size", "2"] if case.tensor_parallel else [])


def start(case: Case, cluster: Cluster | None, host: int, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun of one host."""
    launcher = ["--nproc-per-node", str(case.ranks // case.hosts), "--max-restarts", str(MAX_RESTARTS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if cluster is None:
        launcher += ["--master-port", str(free_port())]
    else:
        launcher += ["--nnodes", str(case.hosts), "--rdzv-backend", "c10d", "--rdzv-id", "fuzz"]
        launcher += ["--rdzv-endpoint", f"{cluster.address(0)}:29500", "--local-addr", cluster.address(host)]
        # Emulated hosts share one name, by which torchrun could not tell where the store belongs.
        launcher += ["--rdzv-conf", f"is_host={int(host == 0)}"]
        env["GLOO_SOCKET_IFNAME"] = "eth0"
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as examples/launch.sh sets it
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "pretrain_gpt.py"]
    command += run_flags(case, folder)
    with open(folder / f"{host}.out", "a") as out, open(folder / f"{host}.err", "a") as err:
        return subprocess.Popen(
            command if cluster is None else cluster.command(host, command),
            cwd=ROOT,
            stdout=out,
            stderr=err,
            env=env,
            start_new_session=True,
        )


def kill_later(agents: list[subprocess.Popen[bytes]], delay: float, rank: int) -> int:
    """SIGKILL a rank of the job after `delay` seconds, or as soon as it exists; 0 when the job has ended before, else
    1."""
    end_at = time.monotonic() + delay
    while all(agent.poll() is None for agent in agents):
        if time.monotonic() >= end_at:
            pids = ranks_of(agents)
            if rank in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
                    return 1
        time.sleep(0.02)
    return 0


def ranks_of(agents: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Rank -> process id of the ranks that run now."""
    found = {}
    for agent in agents:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(agent.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    rank = child.environ().get("RANK")
                    if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(int(rank), child.pid)
    return found


def end(agent: subprocess.Popen[bytes]) -> None:
    """Kill a torchrun that still runs, and its ranks."""
    if agent.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(agent.pid).children(recursive=True):
                child.kill()
        agent.kill()
        agent.wait()


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Cluster | None]:
    """Emulated hosts; None for one host: this machine."""
    if number == 1:
        yield None
    else:
        with Cluster(number, RATE) as cluster:
            yield cluster


def losses(folder: Path) -> dict[int, list[str]]:
    """Iteration -> printed loss and gradient norm; a step that was taken twice must print the same twice."""
    lines = "".join((folder / f"{host}.out").read_text() for host in range(2) if (folder / f"{host}.out").exists())
    found: dict[int, list[str]] = {}
    for part in lines.splitlines(keepends=True):
        for step, values in figures(part).items():
            if found.setdefault(step, values) != values:
                raise Failure(f"step {step} printed {found[step]}, and {values} after a restart")
    return found


@functools.cache
def undisturbed(case: Case) -> dict[int, list[str]]:
    """The losses of the job that nobody disturbs."""
    with tempfile.TemporaryDirectory(prefix="fuzz-restarts-") as folder:
        argv = run_flags(case, Path(folder))
        done = launch.run(argv, Path(folder) / "log", case.ranks, timeout=LIMIT_SECONDS)
        assert not any(done.codes), done.text
        return figures(done.stdout[0])


def _texts(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.[oe][ur][tr]")))


CAMPAIGN = Campaign(
    "restarts",
    draw,
    check,
    simpler,
    lambda case: f"python -c 'from tests.fuzz.restarts import *; print(check({case!r}, Path(tempfile.mkdtemp())))'",
)

if __name__ == "__main__":
    main(CAMPAIGN)
