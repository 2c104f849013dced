"""Lets an interface carry IPv4 packets beyond 64 KB, like network cards that split packets themselves (BIG TCP).

Fewer and larger packets need fewer timers, interrupts and wake-ups: on an emulated cluster the machine's own processor
does the work of the network cards. iproute2 supports the two attributes only since 6.3, so they are set here. Run as a
script inside a namespace.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys

# From <linux/netlink.h>, <linux/rtnetlink.h> and <linux/if_link.h>; Python does not define them.
NETLINK_ROUTE, RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK = 0, 16, 1, 4
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64


def set_largest(interface: str, size: int) -> None:
    """Sets the largest IPv4 packet that the interface sends and that it assembles. Raises OSError."""
    index = socket.if_nametoindex(interface)
    attributes = b"".join(
        struct.pack("=HHI", 8, kind, size) for kind in (IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE)
    )
    link = struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, 0, 0)
    length = 16 + len(link) + len(attributes)
    header = struct.pack("=IHHII", length, RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as netlink:
        netlink.send(header + link + attributes)
        (error,) = struct.unpack("=i", netlink.recv(4096)[16:20])
    if error:
        raise OSError(-error, os.strerror(-error), interface)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interface")
    parser.add_argument("size", type=int)
    arguments = parser.parse_args()
    try:
        set_largest(arguments.interface, arguments.size)
    except OSError as problem:
        sys.exit(str(problem))
