"""Runs every layout on the emulated cluster, in turn, and writes what it measures as a table.

[Note: one run, all rates] A run starts at the lowest rate of the links. After the first step its ranks are held to
their share of a core, and after some more follow the next rates. Each time one step is left out, in which something
changed, and the others count. So all rates of a layout cost one start of its processes.

The bytes on the wire are counted over whole runs, and every second run of a layout has some more steps, without limits
and not in the timeline: the difference is what these send.
"""

from __future__ import annotations

import csv
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import Cluster
from benchmarks.cluster.quota import Quotas, achieved_shares
from benchmarks.planner.emulated.grid import COUNTED, LEFT_OUT, MORE_STEPS, RANKS, RATES, SHARE, STEPS, Case
from benchmarks.planner.emulated.ranks import Ranks, RunError
from benchmarks.planner.emulated.reference import references_of
from megatron.training.logging.line import parse_line

LONGEST_SECONDS = 300.0  # of a run
FREE = 10_000.0  # Mbit/s, of links that are not limited
KINDS = ("compute", "tp", "cp", "dp", "pp", "bubble", "other")
COLUMNS = (
    *("model", "layout", "hosts", "rate", "repeat", "status", "step_ms", "reference_ms", *KINDS),
    *("steps", "sent", "drops", "flags"),
)
_SUMMARY = re.compile(r"where iteration (\d+) went: (\S+) ms((?: \| [a-z]+ [-\d.]+%)+)")


@dataclass(frozen=True)
class Step:
    """A step of a run: milliseconds that it took; fraction of them by kind, the mean over ranks."""

    milliseconds: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """A run. steps: all of them. references: milliseconds of the reference at each rate, the mean over ranks. sent:
    bytes of each host in the whole run. drops: packets lost by full queues."""

    steps: list[Step]
    references: list[float]
    sent: list[int]
    drops: int


def measure(cases: Sequence[Case], repeats: int, out: Path) -> int:
    """Runs all cases `repeats` times, in turn, and writes a line per case, rate and repeat. Returns the failed runs.

    Raises ClusterError and QuotaError if the machine cannot do it.
    """
    progress = _Progress(len(cases) * repeats)
    with Quotas(RANKS, SHARE) as quotas, tempfile.TemporaryDirectory() as folder, open(out, "w", newline="") as file:
        show_shares(quotas)
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for repeat in range(repeats):
            for hosts in sorted({case.model.hosts for case in cases}):
                here = [case for case in cases if case.model.hosts == hosts]
                with Ranks(hosts, RATES[0], quotas, Path(folder)) as ranks:
                    for case in here:
                        rows = list(_rows(case, ranks, quotas, Path(folder), STEPS + MORE_STEPS * (repeat % 2)))
                        table.writerows({**row, "repeat": repeat + 1} for row in rows)
                        file.flush()
                        progress.show(case, rows)
    return progress.failed


def show_shares(quotas: Quotas) -> None:
    """Prints the share of a core that a rank gets, alone and with all others at work."""
    alone = achieved_shares(quotas, [0])[0]
    together = " ".join(f"{share:.1%}" for share in achieved_shares(quotas, range(quotas.ranks)))
    print(f"a rank that computes alone gets {alone:.1%} of a core; all at once: {together}", flush=True)


def run_case(case: Case, ranks: Ranks, quotas: Quotas, folder: Path, steps: int) -> Measured:
    """Runs so many steps of a case. Raises RunError."""
    cluster = ranks.cluster
    quotas.limit(on=False)
    cluster.set_rate(RATES[0])
    drops, sent = cluster.drops(), _sent(cluster)
    done = 0

    def after_line(line: str) -> None:
        nonlocal done
        if "iteration" not in parse_line(line):
            return
        done += 1
        place, within = divmod(done - 1, LEFT_OUT + COUNTED)
        if done in (1, STEPS):
            quotas.limit(on=done == 1)
        if within == 0 and 0 < place <= len(RATES):
            cluster.set_rate([*RATES, FREE][place])

    timeline = ["--profile-timeline", str(folder / "timeline.json"), "--profile-step-start", "2"]
    flags = [*case.flags(steps), *timeline, "--profile-step-end", str(STEPS + 1)]
    texts = ranks.run("pretrain_gpt.py", flags, LONGEST_SECONDS, after_line, reference=True)
    found = steps_of(texts[0])
    if len(found) != steps:
        raise RunError(f"it logged {len(found)} of {steps} steps")
    references = [statistics.fmean(each) for each in zip(*map(references_of, texts), strict=True)]
    each = [after - before for before, after in zip(sent, _sent(cluster), strict=True)]
    return Measured(found, references, each, cluster.drops() - drops)


def _sent(cluster: Cluster) -> list[int]:
    return [cluster.counters(host).sent for host in range(cluster.hosts)]


def steps_of(text: str) -> list[Step]:
    """Returns the steps of rank 0's log, in order, those outside of the timeline without shares.

    The time in the timeline is that of the step alone, without a reference before the next one.
    """
    found = {}
    for number, milliseconds, parts in _SUMMARY.findall(text):
        words = (part.split() for part in parts.split(" | ")[1:])
        shares = {kind: float(value.rstrip("%")) / 100 for kind, value in words}
        found[int(number)] = Step(float(milliseconds), shares)
    lines = [line for line in map(parse_line, text.splitlines()) if "iteration" in line]
    others = {int(line["iteration"]): Step(float(line["elapsed time per iteration (ms)"]), {}) for line in lines}
    return [found.get(number, other) for number, other in others.items()]


def _rows(case: Case, ranks: Ranks, quotas: Quotas, folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Runs so many steps of a case; yields a row per rate."""
    fixed = {"model": case.model.name, "layout": case.layout, "hosts": case.model.hosts, "steps": steps}
    fixed["flags"] = " ".join(case.flags())
    try:
        run = run_case(case, ranks, quotas, folder, steps)
    except RunError as error:
        for rate in RATES:
            yield {**fixed, "rate": f"{rate:g}", "status": f"failed: {error}"}
        return
    for place, rate in enumerate(RATES):
        first = 1 + place * (LEFT_OUT + COUNTED) + LEFT_OUT
        counted = run.steps[first : first + COUNTED]
        means = {kind: sum(step.shares.get(kind, 0.0) for step in counted) / COUNTED for kind in KINDS}
        yield {
            **fixed,
            "rate": f"{rate:g}",
            "status": "ok",
            "step_ms": " ".join(f"{step.milliseconds:.1f}" for step in counted),
            "reference_ms": f"{run.references[place]:.4f}",
            **{kind: f"{mean:.4f}" for kind, mean in means.items()},
            "sent": " ".join(map(str, run.sent)),
            "drops": run.drops,
        }


class _Progress:
    """Prints a line per run, with the time that is left."""

    def __init__(self, total: int) -> None:
        self.failed = 0
        self._total, self._done, self._started = total, 0, time.monotonic()

    def show(self, case: Case, rows: Sequence[dict[str, Any]]) -> None:
        """A run is done."""
        self._done += 1
        bad = [row for row in rows if row["status"] != "ok"]
        self.failed += bool(bad)
        said = bad[0]["status"] if bad else ", ".join(f"{row['step_ms']} ms at {row['rate']} Mbit/s" for row in rows)
        spent = time.monotonic() - self._started
        left = spent / self._done * (self._total - self._done)
        print(f"{self._done}/{self._total} {case.name}: {said} ({left / 60:.0f} min left)", flush=True)
