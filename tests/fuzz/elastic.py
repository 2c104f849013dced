"""Jobs of two or three emulated hosts under `torchrun --nnodes MIN:MAX`: hosts are lost with all their ranks, come late
or come back, and single ranks are killed. Every job must go on by itself within LIMIT_SECONDS, and print the losses of a
job that nobody disturbed.

By hand: `python -m tests.fuzz.elastic --seed 1 --cases 30`. Needs root and iproute2. A line per event says how long the
job took to its next step, and how many steps it took again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster.hosts import Cluster, require_root
from megatron.base.launch import block_exit_signals
from megatron.command_line.entry import run_of
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.store import verify
from megatron.training.loop import Callback
from megatron.training.main import main as train
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer
from tests.e2e.helpers import launch
from tests.e2e.helpers.launch import ROOT
from tests.e2e.helpers.runs import MOCK, figures, flags
from tests.fuzz.campaign import Campaign, Failure, main
from tests.fuzz.kills import SAVES, save_flags
from tests.fuzz.restarts import end, ranks_of

STEPS = 40
STEP_SECONDS = 0.1  # a job of tiny steps would be over before a host has come back
LIMIT_SECONDS = 60.0  # from an event to the next step: twice what it takes on two cores that many processes share
DRIFT = 1e-4  # relative: sums have another order under another number of replicas
NORM_DRIFT = 1.1e-3  # gradient norms are printed with three decimals
RATE = 1000.0  # Mbit/s of an emulated link
# As examples/launch.sh sets it.
MEETING = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5"
LAYOUTS = {
    "dp": {},
    "dp, shared optimizer": {"--use-distributed-optimizer": None},
    "dp, shared parameters": {"--data-parallel-sharding-strategy": "optim_grads_params"},
    "tp": {"--tensor-model-parallel-size": 2, "--sequence-parallel": None},
    "pp": {"--pipeline-model-parallel-size": 2},
}
STORE = "import sys, time, torch.distributed as d; s = d.TCPStore(sys.argv[1], 29500, is_master=True, \
wait_for_workers=False, multi_tenant=True); time.sleep(1e6)"


@dataclass(frozen=True)
class Event:
    """`after` further steps of the job: "kill" kills one rank of the host, "lose" its torchrun and all its ranks, and
    "join" starts a host that is not there. back: seconds after which a lost host is started again; None: never.
    """

    kind: str
    host: int
    after: int
    back: float | None = None


@dataclass(frozen=True)
class Case:
    """A job of up to `hosts` hosts and its events. absent: the hosts that are not there when it begins. apart: the
    rendezvous has a host of its own, so any other may be lost."""

    hosts: int
    minimum: int
    ranks_per_host: int
    layout: str
    batch: int
    save: str
    interval: int
    apart: bool
    events: tuple[Event, ...]
    absent: tuple[int, ...] = ()


def draw(rng: random.Random) -> Case:
    """One to three events, which leave `minimum` hosts or wait for more."""
    hosts, ranks = rng.choice([(2, 1), (2, 2), (3, 1), (3, 1)])
    layout = rng.choice(list(LAYOUTS))
    least = 2 if layout in ("tp", "pp") and ranks == 1 else 1
    minimum = rng.choice([least, least, least, hosts])
    apart = rng.random() < 0.4
    absent = tuple(range(hosts - 1, hosts)) if minimum < hosts and rng.random() < 0.25 else ()
    present, events = [host for host in range(hosts) if host not in absent], []
    for _ in range(rng.choice([1, 2, 2, 3])):
        away = [host for host in range(hosts) if host not in present]
        losable = [host for host in present if host or apart]
        kind = rng.choice(["kill", "lose", "lose"] + ["join"] * 3 * bool(away))
        after = rng.randint(1, 8)
        if kind == "join":
            host = rng.choice(away)
            present.append(host)
            events.append(Event(kind, host, after))
        elif kind == "lose" and losable:
            back = None if len(present) > minimum and rng.random() < 0.5 else round(rng.uniform(0.0, 12.0), 1)
            host = rng.choice(losable)
            events.append(Event(kind, host, after, back))
            if back is None:
                present.remove(host)
        else:
            events.append(Event("kill", rng.choice(present), after))
    batch, interval = rng.choice([8, 8, 12, 24]), rng.choice([1, 3, 10])
    return Case(hosts, minimum, ranks, layout, batch, rng.choice(list(SAVES)), interval, apart, tuple(events), absent)


def simpler(case: Case) -> Iterable[Case]:
    """Plainer flags. Events depend on those before them, so only the last one is left out."""
    if len(case.events) > 1:
        yield dataclasses.replace(case, events=case.events[:-1])
    if case.layout != "dp":
        yield dataclasses.replace(case, layout="dp")
    if case.save != "plain":
        yield dataclasses.replace(case, save="plain")
    if case.ranks_per_host > 1 and case.layout == "dp":
        yield dataclasses.replace(case, ranks_per_host=1)


def run_flags(case: Case, folder: Path, host: int = 0) -> list[str]:
    """Of the training program on a host, which goes on from the newest checkpoint. Local ones have a replica on another
    host."""
    save = folder / "save"
    saving = {"--save": save, "--load": save, "--save-interval": case.interval, "--save-retain": 2}
    batch = {"--train-iters": STEPS, "--global-batch-size": case.batch, "--elastic-world": None}
    replicas = {"--replication": None} if "local" in case.save else {}
    saves = {**save_flags(case.save, disk_of(folder, host)), **replicas}
    return flags(MOCK, batch, saving, LAYOUTS[case.layout], saves)


def disk_of(folder: Path, host: int) -> Path:
    """The disk of a host, which is lost with it."""
    return folder / f"disk{host}"


class Pace(Callback):
    """Steps that take a while."""

    def after_step(self, trainer: Trainer, report: StepReport) -> str | None:
        """See Callback."""
        time.sleep(STEP_SECONDS)
        return None


@dataclass
class Elastic:
    """The processes of a job on its cluster. agents: torchrun by host."""

    case: Case
    cluster: Cluster
    folder: Path
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: int) -> None:
        """Starts torchrun on a host."""
        case, place = self.case, self.case.hosts if self.case.apart else 0
        launcher = ["--nproc-per-node", case.ranks_per_host, "--max-restarts", 20, "--rdzv-backend", "c10d"]
        launcher += ["--nnodes", f"{case.minimum}:{case.hosts}", "--rdzv-id", "fuzz"]
        launcher += ["--rdzv-endpoint", f"{self.cluster.address(place)}:29500"]
        # Emulated hosts share one name, by which torchrun could not tell where the store belongs.
        launcher += ["--rdzv-conf", f"is_host={int(host == place)},{MEETING}"]
        launcher += ["--local-addr", self.cluster.address(host), "-m", "tests.fuzz.elastic", "--paced"]
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *run_flags(case, self.folder, host)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.agents[host] = self._run(host, list(map(str, command)), env)

    def open_store(self) -> subprocess.Popen[bytes]:
        """Starts the store of the rendezvous on a host of its own."""
        command = [sys.executable, "-c", STORE, self.cluster.address(self.case.hosts)]
        return self._run(self.case.hosts, command, dict(os.environ))

    def _run(self, host: int, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{host}.out", "ab") as out, open(self.folder / f"{host}.err", "ab") as err:
            command = self.cluster.command(host, command)
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=env, start_new_session=True)

    def outputs(self) -> dict[int, str]:
        """The output of every host so far."""
        files = {host: self.folder / f"{host}.out" for host in range(self.case.hosts)}
        return {host: file.read_text() if file.exists() else "" for host, file in files.items()}

    def steps(self) -> int:
        """The last step of the job."""
        return max((step for text in self.outputs().values() for step in figures(text)), default=0)

    def ended(self) -> bool:
        """Whether no torchrun is left."""
        return all(agent.poll() is not None for agent in self.agents.values())

    def texts(self) -> str:
        """The end of all output, for messages."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2500:]}" for p in sorted(self.folder.glob("*.[oe][ur][tr]")))


def check(case: Case, folder: Path) -> str:
    """Run the job through its events; then compare its losses."""
    require_root()
    with Cluster(case.hosts + case.apart, RATE) as cluster:
        job = Elastic(case, cluster, folder)
        store = job.open_store() if case.apart else None
        try:
            for host in range(case.hosts):
                if host not in case.absent:
                    job.start(host)
            pass_step(job, 1)
            for event in case.events:
                if job.steps() + event.after < STEPS:
                    pass_step(job, job.steps() + event.after)
                    happen(job, event)
            pass_step(job, STEPS)
            finish(job)
        finally:
            for agent in [*job.agents.values(), *([store] if store else [])]:
                end(agent)
    newest = find(folder / "save", None)
    assert newest is not None
    verify(newest)
    compare(undisturbed(dataclasses.replace(case, events=(), absent=(), apart=False, save="plain")), job)
    return f"healed from {len(case.events)} events"


def pass_step(job: Elastic, step: int) -> None:
    """Waits until the job has printed a step."""
    began, seen = time.monotonic(), job.steps()
    while (now := job.steps()) < step:
        if now != seen:
            began, seen = time.monotonic(), now
        if time.monotonic() > began + LIMIT_SECONDS or job.ended():
            raise Failure(f"no step {step} within {LIMIT_SECONDS:g} s\n{job.texts()}")
        time.sleep(0.05)


def happen(job: Elastic, event: Event) -> None:
    """Lets an event happen and waits for the next step, taken by ranks that have started anew or were not hit."""
    marks = {host: len(text) for host, text in job.outputs().items()}
    before, began, waits = job.steps(), time.monotonic(), 0.0
    if event.kind == "kill":
        ranks = ranks_of([job.agents[event.host]])
        if not ranks:
            return  # a host that has come back while the others trained on, and whose ranks have not started yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[min(ranks)], signal.SIGKILL)
    elif event.kind == "lose":
        end(job.agents.pop(event.host))
        shutil.rmtree(disk_of(job.folder, event.host), ignore_errors=True)
        if event.back is not None:
            time.sleep(event.back)
            waits = event.back
            job.start(event.host)
    else:
        job.start(event.host)
    step = None
    while step is None:
        if job.steps() == STEPS:
            return
        if time.monotonic() > began + waits + LIMIT_SECONDS or job.ended():
            raise Failure(f"no step within {LIMIT_SECONDS:g} s after {event}\n{job.texts()}")
        time.sleep(0.05)
        step = next_step(job, marks, before if event.kind == "lose" else STEPS)
    seconds = time.monotonic() - began
    back = "" if event.back is None else f", back after {event.back:g} s"
    print(
        f"  {event.kind}{back}: {seconds:.1f} s to the next step, {max(0, before + 1 - step)} steps again", flush=True
    )


def next_step(job: Elastic, marks: dict[int, int], before: int) -> int | None:
    """The first step after a start, or the newest one of a job that goes on without the lost host, whose ranks waited;
    None: neither yet."""
    for host, text in job.outputs().items():
        *_, new = re.split("successfully loaded checkpoint|starting from iteration 0", text[marks[host] :])
        if len(text) - len(new) > marks[host] and (taken := figures(new)):
            return min(taken)
    return job.steps() if job.steps() > before + 10 else None


def finish(job: Elastic) -> None:
    """All ranks end, and every torchrun that ends does so well, or finds a rendezvous that is closed: it came as the job
    ended. torchrun itself waits up to five minutes for a host of the last attempt that is not there any more."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while ranks_of(list(job.agents.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left := ranks_of(list(job.agents.values())):
        raise Failure(f"ranks {sorted(left)} still ran {LIMIT_SECONDS:g} s after the last step\n{job.texts()}")
    for host, agent in job.agents.items():
        closed = "RendezvousClosedError" in (job.folder / f"{host}.err").read_text()
        if agent.poll() and not closed:
            raise Failure(f"torchrun of host {host} ended with {agent.returncode}\n{job.texts()}")


def compare(expected: dict[int, list[str]], job: Elastic) -> None:
    """All steps are there, each time they were taken with the losses of the undisturbed job."""
    taken: set[int] = set()
    largest = 0.0
    for text in job.outputs().values():
        for part in text.splitlines(keepends=True):
            for step, values in figures(part).items():
                taken.add(step)
                (loss, norm), (plain_loss, plain_norm) = map(numbers, (values, expected[step]))
                largest = max(largest, abs(loss - plain_loss) / plain_loss)
                if largest > DRIFT or abs(norm - plain_norm) > NORM_DRIFT:
                    raise Failure(f"step {step} printed {values} instead of {expected[step]}\n{job.texts()}")
    if taken != set(expected):
        raise Failure(f"steps {sorted(set(expected) - taken)} are missing\n{job.texts()}")
    print(f"  losses differ by {largest:.1e} at most", flush=True)


def numbers(texts: list[str]) -> list[float]:
    """The values of "name: value"."""
    return [float(text.rpartition(":")[2]) for text in texts]


@functools.cache
def undisturbed(case: Case) -> dict[int, list[str]]:
    """The losses of the job that nobody disturbs, on one host."""
    with tempfile.TemporaryDirectory(prefix="fuzz-elastic-") as folder:
        argv, world = run_flags(case, Path(folder)), case.hosts * case.ranks_per_host
        done = launch.run(argv, Path(folder) / "log", world, timeout=120)
        assert not any(done.codes), done.text
        return figures(done.stdout[0])


CAMPAIGN = Campaign(
    "elastic",
    draw,
    check,
    simpler,
    lambda case: f"python -c 'from tests.fuzz.elastic import *; print(check({case!r}, Path(tempfile.mkdtemp())))'",
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--paced"]:
        block_exit_signals()
        train(run_of(sys.argv[2:], description="test"), further_callbacks=lambda trainer, metrics: [Pace()])
    else:
        main(CAMPAIGN)
