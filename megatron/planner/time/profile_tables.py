"""Figures between those that a profile holds, and near them: products, attention and messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from megatron.base.errors import ConfigError
from megatron.planner.time.constants import Number
from megatron.planner.time.hardware import Place
from megatron.planner.time.operations import ATTENTION_GRADIENT, FusedAttention, Gemm
from megatron.planner.time.profile_file import SEND, AttentionRow, MessageRow, ProductRow
from megatron.spec.collectives import SHIFT

BACKWARD = 2.5  # operations of attention's backward, in units of its forward
_NEAREST = 3  # rows between which a rate is interpolated
_Row = TypeVar("_Row")


def product_seconds(rows: Sequence[ProductRow], gemm: Gemm) -> float:
    """Returns the time of a product: a measured one as it is, others at the rate of those of similar shape."""

    def position(row: ProductRow) -> tuple[float, ...]:
        # A product that adds to an fp32 sum is another one, and a poor substitute.
        return math.log(row.m), math.log(row.n), math.log(row.k), 2.0 * row.accumulates

    target = math.log(max(1.0, gemm.m)), math.log(gemm.n), math.log(gemm.k), 2.0 * gemm.accumulates
    rate = _between(rows, position, lambda row: row.m * row.n * row.k / row.seconds, target)
    return gemm.count * max(1.0, gemm.m) * gemm.n * gemm.k / rate


def attention_seconds(rows: Sequence[AttentionRow], operation: FusedAttention) -> float:
    """Returns the time of attention, at the rate of measured attention over similarly many keys."""
    backward = operation.name == ATTENTION_GRADIENT
    times = BACKWARD if backward else 1.0

    def operations(row: AttentionRow) -> float:
        return 2.0 * row.micro_batch * row.tokens**2 * row.heads * row.head_dim

    def position(row: AttentionRow) -> tuple[float, ...]:
        return math.log(row.tokens), math.log(row.head_dim), math.log(operations(row))

    def rate_of(row: AttentionRow) -> float:
        return times * operations(row) / (row.backward_seconds if backward else row.forward_seconds)

    target = math.log(operation.keys), math.log(operation.head_dim), math.log(operation.operations / times)
    return operation.operations / _between(rows, position, rate_of, target)


class MessageTable:
    """Messages by operation and placement; between two sizes the time is a straight line, and beyond the last one, too.

    A message does not take longer than a larger one: of two that contradict this the shorter time counts.
    """

    def __init__(self, rows: Sequence[MessageRow], path: str) -> None:
        """path: of the profile, for messages."""
        self._path = path
        self._rows: dict[tuple[str, Place], list[MessageRow]] = {}
        for row in rows:
            self._rows.setdefault((row.op, Place(row.ranks, row.together)), []).append(row)
        for sizes in self._rows.values():
            sizes.sort(key=lambda row: row.nbytes)

    def seconds(self, op: str, place: Place, nbytes: float) -> float:
        """Returns the time of a message. Raises ConfigError if nothing like it was measured."""
        if place.size == 1:
            return 0.0
        measured, times = self._similar(op, place)
        shortest = list(itertools.accumulate((row.seconds for row in reversed(measured)), min))[::-1]
        return times * _line([(row.nbytes, seconds) for row, seconds in zip(measured, shortest, strict=True)], nbytes)

    def latency(self, op: str, place: Place) -> float:
        """Returns the time of the smallest message."""
        return 0.0 if place.size == 1 else self.seconds(op, place, self._similar(op, place)[0][0].nbytes)

    def slowing(self, op: str, place: Place, hidden: Number) -> Number:
        """Returns what a computation loses to messages of which it hides so many seconds.

        The work that a message gives to the processor grows with its bytes and not with the time that it waits for the
        link, so what was measured for short and for long messages is interpolated.
        """
        if place.size == 1:
            return 0.0
        seconds, lost = [0.0], [0.0]
        for row in self._similar(op, place)[0]:
            if row.seconds > seconds[-1]:
                seconds.append(row.seconds)
                lost.append(max(lost[-1], row.interference * row.seconds))
        slope = (lost[-1] - lost[-2]) / (seconds[-1] - seconds[-2])
        return np.interp(hidden, seconds, lost) + slope * np.maximum(0.0, hidden - seconds[-1])

    def _similar(self, op: str, place: Place) -> tuple[list[MessageRow], float]:
        """The rows of the operation and the placement, or else of the nearest one, with the factor on their times: each
        rank sends (n - 1) / n of a tensor."""
        if (op, place) in self._rows:
            return self._rows[op, place], 1.0
        measured = [other for of, other in self._rows if of == op and (other.nodes > 1) == (place.nodes > 1)]
        if not measured:
            where = "between nodes" if place.nodes > 1 else "inside of a node"
            raise ConfigError(
                f"--profile {self._path} holds no {op} {where}, and this layout has one of {place.size} ranks; take "
                "the profile on as many nodes and ranks, or plan with --cluster alone"
            )
        nearest = min(measured, key=lambda other: (abs(math.log(other.size / place.size)), -other.together))
        sends_all = op in (SEND, SHIFT)
        times = 1.0 if sends_all else (1 - 1 / place.size) / (1 - 1 / nearest.size)
        return self._rows[op, nearest], times


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The straight lines through ascending points; the first and the last line go on, but not below the first point's y
    on the left."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1] * (max(1.0, x / points[0][0]) if len(points) == 1 else 1.0)
    place = next((number for number, (size, _) in enumerate(points) if x <= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    slope = (y1 - y0) / (x1 - x0)
    if place == len(points) - 1 and x > x1:
        slope = max(slope, 0.0) or y1 / x1
    return y0 + slope * (x - x0)


def _between(
    rows: Sequence[_Row],
    position: Callable[[_Row], tuple[float, ...]],
    value: Callable[[_Row], float],
    target: tuple[float, ...],
) -> float:
    """The value of a row at this position, or else the geometric mean of the nearest rows, weighted by 1 /
    distance^2."""
    distances = sorted(
        ((math.dist(position(row), target), number) for number, row in enumerate(rows)),
    )[:_NEAREST]
    if distances[0][0] < 1e-9:
        return value(rows[distances[0][1]])
    weights = [distance**-2 for distance, _ in distances]
    logarithms = [math.log(value(rows[number])) for _, number in distances]
    return math.exp(
        math.fsum(w * logarithm for w, logarithm in zip(weights, logarithms, strict=True)) / math.fsum(weights)
    )
