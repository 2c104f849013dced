"""The time of messages: which link a group's messages share, and how long they take on it.

A group with g ranks on a node and others elsewhere sends over the network interfaces of its g ranks at once, and the
groups of other coordinates use those of other ranks. So its rate is that of the link in a node, or g times that of one
interface, whichever is lower. Rings pass a node's border once.
"""

from __future__ import annotations

import math

import numpy as np

from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.hardware import Cluster, Place
from megatron.spec.collectives import ALL_REDUCE, ALL_TO_ALL, ALL_TO_ALL_V, SHIFT


def collective_seconds(constants: Constants, cluster: Cluster, place: Place, op: str, nbytes: float) -> Number:
    """Returns the time of a collective. nbytes: of the whole tensor, for all_to_all of a rank's part."""
    if place.size == 1:
        return 0.0
    inside, outside = wire_bytes(place, op, nbytes)
    wire = np.maximum(inside / _link(constants, cluster), outside / _network(constants, cluster))
    if op in (ALL_TO_ALL, ALL_TO_ALL_V) and place.nodes > 1:
        return wire + constants.network_latency
    return wire + latency(constants, place)


def wire_bytes(place: Place, op: str, nbytes: float) -> tuple[float, float]:
    """Returns the bytes that each rank sends over the link of its node, and over its network interface.

    nbytes: of the whole tensor, for all_to_all and shift of a rank's part. All-gather and reduce-scatter send (n - 1) /
    n of the tensor from each rank, an all-reduce twice that. All pass the links; those that pass a node's border are
    shared between the interfaces of the group's ranks there. The slowest hop of a shift counts.
    """
    n, spread = place.size, place.nodes > 1
    if n == 1:
        return 0.0, 0.0
    if op == SHIFT:
        return (0.0, nbytes) if spread else (nbytes, 0.0)
    if op in (ALL_TO_ALL, ALL_TO_ALL_V):
        return nbytes * (place.together - 1) / n, nbytes * (n - place.together) / n
    sent = nbytes * (n - 1) / n * (2 if op == ALL_REDUCE else 1)
    return sent, sent / place.together if spread else 0.0


def latency(constants: Constants, place: Place) -> Number:
    """Returns seconds of a collective with little data: a tree over the nodes, behind one inside of a node."""
    if place.nodes == 1:
        return constants.link_latency
    return constants.link_latency + constants.network_latency * (1 + math.log2(place.nodes)) / 2


def hop_seconds(constants: Constants, cluster: Cluster, place: Place, nbytes: float) -> Number:
    """Returns the time of a message to the next rank of a ring, of which the slowest hop counts."""
    if place.size == 1:
        return 0.0
    wire = nbytes / (_link(constants, cluster) if place.nodes == 1 else _network(constants, cluster))
    return wire + hop_latency(constants, place)


def hop_latency(constants: Constants, place: Place) -> Number:
    """Returns seconds of a message with little data to the next rank of a ring."""
    if place.size == 1:
        return 0.0
    return constants.link_latency if place.nodes == 1 else constants.network_latency


def _link(constants: Constants, cluster: Cluster) -> Number:
    return constants.link * cluster.device.link


def _network(constants: Constants, cluster: Cluster) -> Number:
    return constants.network * cluster.network
