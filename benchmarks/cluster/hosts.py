"""Emulates hosts on one machine: network namespaces on a bridge, with links of a set rate in both directions.

It needs root and iproute2.

[Note: model of a link]
A host is a network namespace with one interface, eth0. The other end of that veth pair is the host's port on a bridge:

  [namespace: eth0] ---- [port, relay while impaired, bridge] ---- the other hosts

Two token buckets shape it: on eth0 (data that the host sends) and on the port (data that it receives). So both
directions carry the full rate at once, and several senders to one host share that host's rate, as behind a switch
without internal contention. The MTU is 9000, as in clusters: headers take 0.7 % of the rate. Inside the machine TCP
passes packets of up to 160 KB that are never split ("super-packets"), which keeps the processor load small; the buckets
count them with the headers of the split packets, the interface's byte counters do not (0.1 %).

A bucket's queue is bounded in bytes, and the receive window of every connection as well: the data that one sender may
have in flight is less than the queue, so that transfers between hosts lose nothing and wait some tens of milliseconds
at most.

Delay and loss are made by a small process between port and bridge (relay.py), because the kernel's netem is not always
available.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from benchmarks.cluster.super_packets import set_largest

RELAY = Path(__file__).with_name("relay.py")
SUPER_PACKETS = Path(__file__).with_name("super_packets.py")
PREFIX = "mpc"  # of every name that this file creates: mpc<pid of the owner>...
MTU = 9000
BURST_SECONDS = 0.004  # a bucket may save up this much of the rate, so that a late timer costs nothing
SUPER_PACKET = 160 * 1024  # bytes
QUEUE_SECONDS = 0.1  # capacity of a bucket's queue before it drops packets
WINDOW_SECONDS = 0.03  # limit of the data in flight per connection at the link's rate
CONGESTION = "reno"


class ClusterError(Exception):
    """The machine cannot emulate the cluster, or a command of iproute2 failed."""


@dataclass(frozen=True)
class Counters:
    """The bytes that have passed a host's eth0 so far, with link-layer headers."""

    sent: int
    received: int


class Cluster:
    """`hosts` hosts whose links run at `rate` Mbit/s in each direction. A context manager: leaving it removes
    everything.

    Processes that still run on its hosts are killed on exit, also after an exception, SIGINT or SIGTERM. Leftovers of a
    killed run are removed when the next cluster starts.
    """

    def __init__(self, hosts: int, rate: float, super_packet: int = SUPER_PACKET) -> None:
        """super_packet: bytes of the largest one. A pause lets a link send two of them faster than at its rate, so
        where short messages count they have to be small; large ones take less of the processors' time."""
        self.hosts, self.rate, self.super_packet = hosts, rate, super_packet
        self._name = f"{PREFIX}{os.getpid()}"
        self._relays: dict[int, subprocess.Popen[bytes]] = {}
        self._old_handler: object = None

    def __enter__(self) -> Cluster:
        require_root()
        remove_leftovers()
        self._old_handler = signal.signal(signal.SIGTERM, _terminate)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """Returns the IPv4 address of a host, which is the same in every cluster: no cluster can be reached from
        outside.
        """
        return f"10.77.0.{host + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs `argv` on a host."""
        return ["ip", "netns", "exec", self._namespace(host), *argv]

    def set_rate(self, rate: float, hosts: Sequence[int] | None = None) -> None:
        """Sets the rate of both directions, in Mbit/s, of some links or all, immediately and while they are in use."""
        for host in range(self.hosts) if hosts is None else hosts:
            shape = bucket(rate, self.super_packet)
            run("tc", "-n", self._namespace(host), "qdisc", "replace", "dev", "eth0", "root", *shape)
            run("tc", "qdisc", "replace", "dev", self._port(host), "root", *shape)
            self._limit_windows(host, rate)

    def set_link(self, host: int, *, up: bool) -> None:
        """Sets a host's link down or up again, like a pulled cable: neither end is notified by a packet."""
        run("ip", "link", "set", self._port(host), "up" if up else "down")

    def impair(self, host: int, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Adds one-way delay in both directions of a host's link and loses a fraction of its packets; 0 and 0 end it.

        While packets can be lost the host sends and receives single packets of the MTU, so that each loss is one
        packet.
        """
        self._end_relay(host)
        if not delay_ms and not loss:
            return
        port, inner, outer = self._port(host), f"{self._name}i{host}", f"{self._name}o{host}"
        run("ip", "link", "add", inner, "mtu", str(MTU), "type", "veth", "peer", "name", outer, "mtu", str(MTU))
        run("ip", "link", "set", outer, "master", self._name, "up")
        run("ip", "link", "set", inner, "up")
        if loss:
            self._segments(1)
        run("ip", "link", "set", port, "nomaster", "promisc", "on")
        command = [sys.executable, str(RELAY), port, inner, str(delay_ms / 1000), str(loss)]
        self._relays[host] = subprocess.Popen(command, start_new_session=True)

    def counters(self, host: int) -> Counters:
        """Returns the bytes that have passed the host's interface since the cluster was created."""
        # The port receives the data that eth0 sends, and vice versa; reading it does not require entering the
        # namespace.
        folder = Path("/sys/class/net") / self._port(host) / "statistics"
        return Counters(int((folder / "rx_bytes").read_text()), int((folder / "tx_bytes").read_text()))

    def drops(self) -> int:
        """Returns the number of packets dropped by full queues so far, over all links."""
        total = 0
        for host in range(self.hosts):
            total += _dropped("tc", "-n", self._namespace(host), "-s", "-j", "qdisc", "show", "dev", "eth0")
            total += _dropped("tc", "-s", "-j", "qdisc", "show", "dev", self._port(host))
        return total

    def _build(self) -> None:
        run("ip", "link", "add", self._name, "type", "bridge", "mcast_snooping", "0")
        run("ip", "link", "set", self._name, "mtu", str(MTU), "up")
        for host in range(self.hosts):
            space, port = self._namespace(host), self._port(host)
            run("ip", "netns", "add", space)
            pair = ["type", "veth", "peer", "name", "eth0", "netns", space, "mtu", str(MTU)]
            run("ip", "link", "add", port, "mtu", str(MTU), *pair)
            run("ip", "link", "set", port, "master", self._name, "up")
            run("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            largest = [sys.executable, str(SUPER_PACKETS), "eth0", str(self.super_packet)]
            run("ip", "netns", "exec", space, *largest)
            set_largest(port, self.super_packet)
            for device in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", device, "up")
        self.set_rate(self.rate)

    def _limit_windows(self, host: int, rate: float) -> None:
        window = 2 * max(512 * 1024, int(rate * 1e6 / 8 * WINDOW_SECONDS))  # half of the memory becomes the window
        settings = {
            "tcp_congestion_control": CONGESTION,
            "tcp_rmem": f"4096 {window} {window}",
            "tcp_wmem": f"4096 {window} {window}",
        }
        for name, value in settings.items():
            write = f"echo {value} > /proc/sys/net/ipv4/{name}"
            run("ip", "netns", "exec", self._namespace(host), "sh", "-c", write)

    def _segments(self, most: int) -> None:
        for host in range(self.hosts):
            run("ip", "-n", self._namespace(host), "link", "set", "eth0", "gso_max_segs", str(most))

    def _end_relay(self, host: int) -> None:
        relay = self._relays.pop(host, None)
        if relay is None:
            return
        relay.kill()
        relay.wait()
        run("ip", "link", "delete", f"{self._name}i{host}")
        run("ip", "link", "set", self._port(host), "promisc", "off", "master", self._name)
        if not self._relays:
            self._segments(65535)

    def _remove(self) -> None:
        signal.signal(signal.SIGTERM, self._old_handler)  # type: ignore[arg-type]
        with held(signal.SIGINT, signal.SIGTERM):
            for relay in self._relays.values():
                relay.kill()
                relay.wait()
            self._relays.clear()
            remove(os.getpid())

    def _namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    def _port(self, host: int) -> str:
        return f"{self._name}p{host}"


def bucket(rate: float, super_packet: int = SUPER_PACKET) -> list[str]:
    """Returns the arguments of tc for a link of `rate` Mbit/s. The kernel splits super-packets with a smaller burst."""
    bytes_a_second = rate * 1e6 / 8
    least = 2 * super_packet
    burst = max(least, int(bytes_a_second * BURST_SECONDS))
    limit = max(8 * SUPER_PACKET, int(bytes_a_second * QUEUE_SECONDS))
    return ["tbf", "rate", f"{rate:g}mbit", "burst", str(burst), "limit", str(limit)]


def require_root() -> None:
    """Raises ClusterError if a cluster cannot be created."""
    if os.geteuid() != 0:
        raise ClusterError(
            "an emulated cluster needs root (network namespaces); start it with sudo or in a container as root"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ClusterError(f"an emulated cluster needs iproute2, and `{tool}` is not on the PATH; install iproute2")


def remove_leftovers() -> None:
    """Removes the hosts of owners that no longer run."""
    found = re.findall(rf"\b{PREFIX}(\d+)[a-z]?", run("ip", "netns", "list") + run("ip", "-brief", "link"))
    for pid in sorted({int(pid) for pid in found}):
        if not Path(f"/proc/{pid}").exists():
            remove(pid)


def remove(owner: int) -> None:
    """Kills all processes on the hosts of the cluster that process `owner` created, and removes them. Safe to
    repeat."""
    name = f"{PREFIX}{owner}"
    for space in re.findall(rf"^{name}h\d+", run("ip", "netns", "list"), re.MULTILINE):
        while pids := run("ip", "netns", "pids", space).split():  # a process may be starting others
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        run("ip", "netns", "delete", space)
    for link in re.findall(rf"^{name}\w*", run("ip", "-brief", "link"), re.MULTILINE):
        # Deleting one end of a pair deletes the other, too.
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)


def run(*command: str) -> str:
    """Returns the output of a command of iproute2. Raises ClusterError with its error message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def held(*signals: signal.Signals) -> Iterator[None]:
    """Delivers `signals` only after the block, so that a second Ctrl-C does not stop the clean-up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _dropped(*command: str) -> int:
    return sum(int(queue.get("drops", 0)) for queue in json.loads(run(*command)))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
