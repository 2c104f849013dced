"""Tests a training job when a link of its cluster goes down, and when a link is slow and loses packets.

link-down: in the middle of a run one host's link goes down. Every rank must end within the timeout and name the
collective that failed and the missing ranks. bad-link: one host's link gets delay and loss. Losses must equal those of
a good link in every digit; the table shows how much slower steps are. Each set of flags is a separate run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.cluster.hosts import Cluster, ClusterError
from benchmarks.cluster.job import Job, JobError
from megatron.training.logging.line import parse_line

START_SECONDS = 120.0
GRACE_SECONDS = 15.0  # after the timeout: to find the missing ranks, to report them, to end
NAMED = re.compile(r"error on rank \d+: .*\w+ number \d+ on group \w+ \(ranks [^)]*\) failed after .*\brank \d+\b")


def main() -> int:
    """Returns 0 on success, 1 on failure, 2 if the machine cannot emulate a cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=["link-down", "bad-link"], help="link-down, bad-link or both")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=400.0, help="Mbit/s")
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds a collective may take, for link-down")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way, for bad-link")
    parser.add_argument("--loss", type=float, default=0.01, help="fraction of packets, for bad-link")
    parser.add_argument("--iterations", type=int, default=12, help="for bad-link")
    parser.add_argument(
        "--flags", action="append", help="flags of a run, quoted: --flags='--a --b'; once per run to compare"
    )
    args = parser.parse_args()
    args.flags = args.flags or [""]
    if unknown := set(args.faults) - {"link-down", "bad-link"}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; give link-down, bad-link or both")
    held = True
    try:
        for flags in args.flags:
            if "link-down" in args.faults:
                held &= link_down(args, flags)
        if "bad-link" in args.faults:
            held &= bad_link(args)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if held else 1


def link_down(args: argparse.Namespace, flags: str) -> bool:
    """Disconnects the last host after some steps; prints the errors of each rank. Returns whether all ended in time."""
    print(
        f"\nlink down at host {args.hosts - 1} of {args.hosts}, timeout {args.timeout:g} s, flags: {flags or '(none)'}"
    )
    with Cluster(args.hosts, args.rate) as cluster:
        with Job(cluster, sys.executable, shlex.split(flags), iterations=10**6, timeout=args.timeout) as job:
            job.wait_for("iteration        3/", START_SECONDS)
            cluster.set_link(args.hosts - 1, up=False)
            down = time.monotonic()
            in_time = job.wait(args.timeout + GRACE_SECONDS)
            time.sleep(0.5)  # the last lines arrive
            named = True
            for number, rank in enumerate(job.ranks):
                after = "still runs" if rank.ended is None else f"ended after {rank.ended - down:.1f} s"
                print(f"  rank {number}: {after}")
                errors = [(when, text) for when, text in rank.lines if text.startswith(f"error on rank {number}:")]
                for when, text in errors:
                    print(f"    {when - down:5.1f} s  {text}")
                named &= any(NAMED.search(text) for _, text in errors)
    print(
        f"  every rank ended in time: {_yes(in_time)}; every rank named collective and peer: {_yes(named)}", flush=True
    )
    return in_time and named


def bad_link(args: argparse.Namespace) -> bool:
    """Prints seconds per step on good links and with a bad link, per set of flags. Returns whether all losses are
    equal.
    """
    print(
        f"\n{args.hosts} hosts at {args.rate:g} Mbit/s; the last one's link gets {args.delay_ms:g} ms each way and "
        f"loses {args.loss:.1%} of packets; median of {args.iterations} steps\n"
        f"{'good s':>8} {'bad s':>8} {'slower':>7} {'same losses':>12}  flags"
    )
    all_same = True
    for flags in args.flags:
        good_seconds, good = train(args, flags, bad=False)
        bad_seconds, bad = train(args, flags, bad=True)
        all_same &= good == bad
        slower = f"{bad_seconds / good_seconds:.2f}x"
        print(f"{good_seconds:8.3f} {bad_seconds:8.3f} {slower:>7} {_yes(good == bad):>12}  {flags}", flush=True)
    return all_same


def train(args: argparse.Namespace, flags: str, *, bad: bool) -> tuple[float, list[str]]:
    """Returns (median seconds per step, the printed loss of every step) of one run."""
    with Cluster(args.hosts, args.rate) as cluster:
        if bad:
            cluster.impair(args.hosts - 1, delay_ms=args.delay_ms, loss=args.loss)
        with Job(cluster, sys.executable, shlex.split(flags), iterations=args.iterations, timeout=600) as job:
            if not job.wait(600.0):
                raise JobError(f"the run did not end within 600 s; rank 0 last said:\n{job.tail(0)}")
            said = [text for _, text in job.ranks[0].lines]
    return read_log(said, args.iterations)


def read_log(lines: Sequence[str], iterations: int) -> tuple[float, list[str]]:
    """Returns (median seconds per step without the first, loss of every step as printed)."""
    steps = [line for line in lines if "lm loss:" in line and "iteration" in line]
    if len(steps) != iterations:
        raise JobError(
            f"expected {iterations} steps in the log, found {len(steps)}; the last lines:\n" + "\n".join(lines[-15:])
        )
    seconds = [float(parse_line(line)["elapsed time per iteration (ms)"]) / 1000 for line in steps[1:]]
    losses = [re.findall(r"lm loss: (\S+)", line)[0] for line in steps]
    return statistics.median(seconds), losses


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    sys.exit(main())
