"""A link with delay and loss: forwards Ethernet frames between two interfaces, each direction separately.

It needs Linux and root. Frames are read and written with the kernel's own description of them (PACKET_VNET_HDR:
checksum still to be computed, super-packet still to be split), so that they pass as if the two interfaces were one
wire.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque

# From <linux/if_packet.h>; Python does not define them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
LARGEST = 70_000  # bytes: a super-packet with its headers
LONGEST_WAIT = 1.0  # seconds between two checks whether the owner still runs
QUEUE = 4096  # maximum number of frames in flight in one direction


class Direction:
    """Forwards frames from one socket to another after `delay` seconds, without those that are lost."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float, loss: float) -> None:
        self._source, self._target, self._delay, self._loss = source, target, delay, loss
        self._frames: deque[tuple[float, bytes]] = deque()

    def receive(self) -> None:
        """Reads all frames that have arrived."""
        now = time.monotonic()
        while True:
            try:
                frame = self._source.recv(LARGEST)
            except OSError:  # no more frames have arrived, or the link is down and may come up again
                return
            if len(self._frames) < QUEUE and random.random() >= self._loss:
                self._frames.append((now + self._delay, frame))

    def send(self, now: float) -> float:
        """Sends the frames that are due; returns the seconds until the next one is."""
        while self._frames and self._frames[0][0] <= now:
            try:
                self._target.send(self._frames[0][1])
            except BlockingIOError:  # the link's queue is full: the rate decides
                return 0.001
            except OSError:  # ENOBUFS, or the link is down: lost
                pass
            self._frames.popleft()
        return self._frames[0][0] - now if self._frames else LONGEST_WAIT


def main() -> None:
    """Forwards until terminated, or until the process that started this one has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("left")
    parser.add_argument("right")
    parser.add_argument("delay", type=float, help="seconds, one way")
    parser.add_argument("loss", type=float, help="fraction of the frames")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    left, right = open_interface(args.left), open_interface(args.right)
    directions = {
        left: Direction(left, right, args.delay, args.loss),
        right: Direction(right, left, args.delay, args.loss),
    }
    owner, wait = os.getppid(), LONGEST_WAIT
    while os.getppid() == owner:
        ready, _, _ = select.select(list(directions), [], [], wait)
        for source in ready:
            directions[source].receive()
        now = time.monotonic()
        wait = max(0.0, min(direction.send(now) for direction in directions.values()))


def open_interface(name: str) -> socket.socket:
    """Returns a socket that reads every frame that arrives at an interface, and none that leaves it."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    opened.setblocking(False)
    opened.bind((name, ETH_P_ALL))
    return opened


if __name__ == "__main__":
    main()
