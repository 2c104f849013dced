"""Prints why one of the layouts that a search found takes the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.planner.search.explain import Comparison, Explanation, Gain, Neighbour, differences
from megatron.planner.search.itemize import LinkLoad, OperationTime
from megatron.planner.search.layout import Layout
from megatron.planner.search.search import PlannedLayout
from megatron.planner.time.groups import grouped
from megatron.planner.time.hardware import GB, GIB, used_memory
from megatron.tooling.plan.layouts import seconds_text

MS = 1e-3
SHOWN = 10  # operations of the table
LEAST_GAIN = 0.0005  # share of a step below which a faster resource brings nothing


def operations_table(items: Sequence[OperationTime], seconds: float) -> Table:
    """Returns the longest operations, and the sum of all others."""
    table = _table("operations of the slowest rank", "part", "times per step", "ms per step", "share")
    for item in items[:SHOWN]:
        times = f"{item.times:,}" if item.times else ""
        table.add_row(item.name, item.part, times, f"{item.seconds / MS:.1f}", f"{item.seconds / seconds:.1%}")
    remaining = items[SHOWN:]
    if remaining:
        spent = sum(item.seconds for item in remaining)
        table.add_row(f"{len(remaining)} others", "", "", f"{spent / MS:.1f}", f"{spent / seconds:.1%}", style="dim")
    return table


def links_table(loads: Sequence[LinkLoad], seconds: float) -> Table:
    """Returns the links with their bytes per step, and the share of a step in which they are busy."""
    table = _table("links of a device of the slowest rank", "GB/s", "GB sent per step", "busy")
    for load in sorted(loads, key=lambda load: -load.busy(seconds)):
        table.add_row(load.link, f"{load.rate / GB:g}", f"{load.nbytes / GB:.2f}", f"{load.busy(seconds):.1%}")
    return table


def gains_table(gains: Sequence[Gain], seconds: float) -> Table:
    """Returns the step with each resource 10 % faster."""
    table = _table("10 % faster", "step s", "change")
    for gain in gains:
        change = 1 - gain.seconds / seconds
        table.add_row(gain.resource, seconds_text(gain.seconds), f"-{change:.1%}" if change > LEAST_GAIN else "none")
    return table


def neighbours_table(layout: Layout, neighbours: Sequence[Neighbour], seconds: float) -> Table:
    """Returns the best layout for another value of each axis."""
    table = _table("one change", "here", "best other value", "step s", "change")
    for neighbour in neighbours:
        current = _value(getattr(layout, neighbour.axis))
        if neighbour.layout is None:
            table.add_row(_axis(neighbour.axis), current, "none fits", "", "")
            continue
        changed = [_value(getattr(neighbour.layout, neighbour.axis))]
        changed += [f"{_axis(axis)} {_value(getattr(neighbour.layout, axis))}" for axis in neighbour.changed[1:]]
        change = f"{neighbour.seconds / seconds - 1:+.1%}"
        table.add_row(_axis(neighbour.axis), current, ", ".join(changed), seconds_text(neighbour.seconds), change)
    return table


def print_explanation(console: Console, layout: Layout, explanation: Explanation, seconds: float) -> None:
    """Prints the four tables one below the other."""
    console.print(operations_table(explanation.operations, seconds))
    console.print(links_table(explanation.links, seconds))
    if explanation.gains:
        console.print(gains_table(explanation.gains, seconds))
    console.print(neighbours_table(layout, explanation.neighbours, seconds))


def comparison_lines(comparison: Comparison, best: PlannedLayout, limit: float) -> list[str]:
    """Returns what keeps the user's layout from being the best one. limit: bytes of device memory that a layout may
    take."""
    if comparison.time is None:
        return [f"the run would refuse these flags: {problem}" for problem in comparison.problems]
    fullest = max(comparison.ranks, key=lambda rank: rank.peak)
    memory = float(used_memory(fullest.peak))
    seconds, fastest = float(comparison.time.seconds), float(best.time.seconds)
    lines = [
        f"these flags: {seconds_text(seconds)} s per step, {seconds / fastest - 1:+.1%} against layout 1, and "
        f"{memory / GIB:.1f} GiB on the fullest rank"
    ]
    if memory > limit:
        kinds = sorted(fullest.at_peak.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{kind} {nbytes / GIB:.1f}" for kind, nbytes in kinds)
        lines.append(
            f"they do not fit: {(memory - limit) / GIB:.1f} GiB too much for {limit / GIB:.0f}, in pipeline rank "
            f"{fullest.rank} at {fullest.moment}; most of it are {largest}"
        )
    changes = differences(grouped(best.time.parts), grouped(comparison.time.parts))
    words = [f"{name} {change:+.3f} s" for name, change in changes if abs(change) > LEAST_GAIN * fastest]
    lines.append(f"the difference by part: {', '.join(words) if words else 'none'}")
    return lines


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("times per step", "ms per step", "share", "GB/s", "GB sent per step", "busy", "step s", "change")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    return table


def _axis(name: str) -> str:
    return name.replace("_", " ")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
