"""Checks the emulation: the rate of plain TCP transfers between emulated hosts, as a fraction of the set rate.

Every host sends to every other host at the same time; the slowest host's figure is printed. Prints one table.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.cluster.hosts import Cluster, ClusterError

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.cluster.wire_check"
PORT = 5201


def main() -> int:
    """Prints one row per (hosts, rate)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 400, 200, 100])
    parser.add_argument("--megabytes", type=float, default=100.0, help="amount that each host sends")
    args = parser.parse_args()
    print(f"{'hosts':>5} {'Mbit/s':>7} {'seconds':>8} {'reached':>8} {'of rate':>8} {'drops':>6} {'cores busy':>10}")
    try:
        for hosts in args.hosts:
            for rate in args.rates:
                print(row(hosts, rate, args.megabytes), flush=True)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def row(hosts: int, rate: float, megabytes: float) -> str:
    """Measures transfers of all hosts to all others at the same time."""
    with Cluster(hosts, rate) as cluster:
        peers = [cluster.address(host) for host in range(hosts)]
        each = str(int(megabytes * 1e6 / (hosts - 1)))
        busy = busy_seconds()
        started = time.monotonic()
        processes = [
            subprocess.Popen(
                cluster.command(host, [sys.executable, "-m", MODULE, "--peer", str(host), each, *peers]),
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
            for host in range(hosts)
        ]
        times = [json.loads(process.communicate()[0]) for process in processes]
        cores = (busy_seconds() - busy) / (time.monotonic() - started)
        drops = cluster.drops()
    reached = megabytes * 8 / max(times)
    return f"{hosts:5} {rate:7g} {max(times):8.2f} {reached:8.1f} {reached / rate:8.3f} {drops:6} {cores:10.2f}"


def busy_seconds() -> float:
    """Returns the processor time that the machine has spent so far."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + irq + soft) / 100


def peer(me: int, each: int, addresses: list[str]) -> float:
    """Sends `each` bytes to every other address and receives as many from each; returns seconds until all has arrived
    here.
    """
    others = [other for other in range(len(addresses)) if other != me]
    listener = socket.create_server((addresses[me], PORT), backlog=16)
    out = [connect(addresses[other]) for other in others]
    incoming = [listener.accept()[0] for _ in others]
    started = time.monotonic()
    threads = [threading.Thread(target=send, args=(to, each)) for to in out]
    threads += [threading.Thread(target=receive, args=(source, each)) for source in incoming]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def connect(address: str) -> socket.socket:
    """Connects to a peer that may not listen yet."""
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)


def send(to: socket.socket, count: int) -> None:
    """Sends `count` bytes."""
    block = memoryview(bytes(1 << 20))
    while count > 0:
        count -= to.send(block[: min(count, len(block))])


def receive(source: socket.socket, count: int) -> None:
    """Receives `count` bytes and discards them."""
    block = bytearray(1 << 20)
    while count > 0:
        got = source.recv_into(block)
        assert got, f"the peer closed with {count} bytes to come"
        count -= got


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        print(json.dumps(peer(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
    else:
        sys.exit(main())
