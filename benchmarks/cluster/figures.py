"""Converts measured seconds and bytes to the rows of the table: bounds, ratios, text. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FP32 = 4  # bytes


@dataclass(frozen=True)
class Cell:
    """The conditions under which the systems are compared."""

    hosts: int
    rate: float  # Mbit/s, per link and direction
    accumulation: int  # microbatches per step


@dataclass(frozen=True)
class Row:
    """One system in one cell. Times are medians over steps of the slowest rank; bytes and memory are the largest
    rank's.
    """

    cell: Cell
    system: str
    step: float  # seconds
    fastest: float
    slowest: float
    bound: float  # lower bound of the seconds per step, with perfect overlap
    compute: float  # seconds of a step without communication
    sent: float  # bytes per rank and step
    wire_bytes: float  # the bytes that the system's collectives must send
    memory: int  # bytes of gradients, optimizer state and buffers
    loss: float


def step_bound(cell: Cell, forward: float, backward: float, numel: int) -> float:
    """Returns the lower bound in seconds: max(F, AG) + max(B, RS) + the other microbatches' compute.

    The all-gather can overlap only with the first forward, the reduce-scatter only with the last backward. `numel` fp32
    elements, of which a rank sends (N-1)/N in each.
    """
    wire = FP32 * numel * (cell.hosts - 1) / cell.hosts / (cell.rate * 1e6 / 8)
    return max(forward, wire) + max(backward, wire) + (cell.accumulation - 1) * (forward + backward)


def make_rows(cell: Cell, numel: int, titles: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns one row per system from every rank's figures (worker.Measured as dictionaries); "compute" must be
    included.
    """
    forward = max(rank["compute"]["forward"] for rank in ranks)
    backward = max(rank["compute"]["backward"] for rank in ranks)
    bound = step_bound(cell, forward, backward, numel)
    compute = statistics.median(slowest_rank([rank["compute"]["seconds"] for rank in ranks]))
    rows = []
    for name in ranks[0]:
        own = [rank[name] for rank in ranks]
        steps = slowest_rank([figures["seconds"] for figures in own])
        rows.append(
            Row(
                cell,
                titles[name],
                step=statistics.median(steps),
                fastest=min(steps),
                slowest=max(steps),
                bound=bound,
                compute=compute,
                sent=max(statistics.median(figures["sent"]) for figures in own),
                wire_bytes=max(figures["wire_bytes"] for figures in own),
                memory=max(figures["memory"] for figures in own),
                loss=statistics.fmean(figures["loss"] for figures in own),
            )
        )
    return rows


def slowest_rank(times: Sequence[Sequence[float]]) -> list[float]:
    """[rank][step] -> the maximum of each step."""
    return [max(step) for step in zip(*times, strict=True)]


HEADER = (
    f"{'hosts':>5} {'Mbit/s':>6} {'GA':>3}  {'system':30} {'step s':>7} {'bound s':>7} {'ratio':>6} {'efficiency':>10} "
    f"{'sent MB':>8} {'least MB':>8} {'ratio':>6} {'grad+opt MB':>11}"
)
LEGEND = (
    "step: median seconds, slowest rank. bound: max(F, AG) + max(B, RS) + other microbatches' compute, at the wire's "
    "rate.\nefficiency: compute only / step. sent: bytes per rank and step by the interface's counter; least: those "
    "that the\nsystem's collectives must send. grad+opt: gradients, optimizer state and buffers per rank."
)


def line(row: Row) -> str:
    """Formats a row of the table."""
    cell = row.cell
    wire = (
        f"{row.sent / 1e6:8.1f} {row.wire_bytes / 1e6:8.1f} {row.sent / row.wire_bytes:6.3f}" if row.wire_bytes else ""
    )
    return (
        f"{cell.hosts:5} {cell.rate:6g} {cell.accumulation:3}  {row.system:30} {row.step:7.3f} {row.bound:7.3f} "
        f"{row.step / row.bound:6.3f} {row.compute / row.step:10.3f} {wire:24} {row.memory / 1e6:11.1f}"
    )


def losses_agree(rows: Sequence[Row], limit: float = 1e-3) -> bool:
    """Returns whether all training systems have the same loss, which shows that they have done the same work."""
    losses = [row.loss for row in rows if row.wire_bytes]
    return not losses or max(losses) - min(losses) <= limit * max(losses)
