"""Compares what was predicted with what was measured: a table per model and link, the order of layouts, and a
picture."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.planner.emulated.measure import KINDS
from benchmarks.planner.published_runs import tau

FIRST = 5  # layouts that a search hands over
_MARKERS = {"narrow": "o", "wide": "s"}
_COLORS = {100.0: "tab:red", 300.0: "tab:orange", 1000.0: "tab:blue"}


@dataclass(frozen=True)
class Compared:
    """A layout on links of one rate. Seconds of a step, predicted for processors as fast as in the run and as fast as
    in the profile; spread: half the distance between the quartiles of the measured ones, divided by the median. Shares
    by kind. sent: bytes of a step, over all hosts; None where not measured.
    """

    model: str
    layout: str
    rate: float
    measured: float
    spread: float
    predicted: float
    at_profile_speed: float
    measured_shares: dict[str, float]
    predicted_shares: dict[str, float]
    sent: float | None
    sent_predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def wire_error(self) -> float | None:
        """Relative difference of the measured bytes from the predicted ones."""
        return None if self.sent is None else self.sent / self.sent_predicted - 1

    @property
    def farthest(self) -> tuple[str, float]:
        """The kind whose share is predicted worst, and the difference in points."""
        points = {kind: 100 * (self.predicted_shares[kind] - self.measured_shares[kind]) for kind in KINDS}
        return max(points.items(), key=lambda item: abs(item[1]))


def compare(measured: Path, predicted: Path) -> tuple[list[Compared], list[str]]:
    """Returns the cases that were measured and predicted, and a line for each case that failed."""
    runs: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    failed: dict[str, None] = {}
    for row in _read(measured):
        if row["status"] == "ok":
            runs.setdefault((row["model"], row["layout"], row["rate"]), []).append(row)
        else:
            failed[f"{row['model']}: {row['layout']}: {row['status']}"] = None
    found = []
    for row in _read(predicted):
        alike = runs.get((row["model"], row["layout"], row["rate"]), [])
        if not alike:
            continue
        seconds = [float(word) / 1e3 for each in alike for word in each["step_ms"].split()]
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        found.append(
            Compared(
                model=row["model"],
                layout=row["layout"],
                rate=float(row["rate"]),
                measured=median,
                spread=(high - low) / 2 / median,
                predicted=float(row["step_ms"]) / 1e3,
                at_profile_speed=float(row["profile_speed_ms"]) / 1e3,
                measured_shares={kind: statistics.mean(float(each[kind]) for each in alike) for kind in KINDS},
                predicted_shares={kind: float(row[kind]) for kind in KINDS},
                sent=_sent(alike),
                sent_predicted=sum(map(float, row["sent"].split())),
            )
        )
    return found, list(failed)


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _sent(runs: Sequence[dict[str, str]]) -> float | None:
    """Bytes of one step over all hosts: the difference between long and short runs. None without both."""
    totals: dict[int, list[float]] = {}
    for run in runs:
        totals.setdefault(int(run["steps"]), []).append(sum(map(float, run["sent"].split())))
    if len(totals) < 2:
        return None
    few, many = min(totals), max(totals)
    return (statistics.mean(totals[many]) - statistics.mean(totals[few])) / (many - few)


def report(found: Sequence[Compared], failed: Sequence[str]) -> str:
    """Returns the report as Markdown."""
    cells = _cells(found)
    lines = ["# Emulated cluster", "", *_overall(found, cells)]
    lines += [f"failed: {line}" for line in failed]
    for model, rate, cell in cells:
        lines += ["", f"## {model}, {rate:g} Mbit/s", "", *_table(cell)]
    return "\n".join(lines) + "\n"


def _cells(found: Sequence[Compared]) -> list[tuple[str, float, list[Compared]]]:
    """(model, rate, its layouts)."""
    keys = dict.fromkeys((each.model, each.rate) for each in found)
    return [(*key, [each for each in found if (each.model, each.rate) == key]) for key in sorted(keys)]


def _overall(found: Sequence[Compared], cells: Sequence[tuple[str, float, list[Compared]]]) -> Iterator[str]:
    yield "| model | Mbit/s | layouts | median error | p90 | constant MFU | p90 | tau | best is predicted as number |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for model, rate, cell in cells:
        yield f"| {model} | {rate:g} | {len(cell)} | {_errors(cell)} | {_tau(cell):.2f} | {_place_of_best(cell)} |"
    yield f"| all | | {len(found)} | {_errors(found)} | | |"
    yield ""
    plain = [abs(each.at_profile_speed / each.measured - 1) for each in found]
    yield (
        "Predictions are for processors as fast as in each run. For those of the profile's time the errors are "
        f"{100 * np.median(plain):.1f} % in the median and {100 * np.percentile(plain, 90):.1f} % in the 90th "
        "percentile."
    )
    firsts = [_place_of_best(cell) for _, _, cell in cells]
    yield (
        f"The fastest layout is among the first {FIRST} predicted in {sum(place <= FIRST for place in firsts)} and the "
        f"first in {sum(place == 1 for place in firsts)} of {len(cells)} cells."
    )
    points = [abs(each.farthest[1]) for each in found]
    within = sum(point <= 4 for point in points)
    yield (
        f"The part of a step that is predicted worst differs by {np.median(points):.1f} points in the median, "
        f"{np.percentile(points, 90):.1f} in the 90th percentile; all parts are within 4 points in {within} of "
        f"{len(found)}."
    )
    wire = [abs(each.wire_error) for each in found if each.wire_error is not None]
    if wire:
        yield f"Bytes on the wire differ by {np.median(wire):.2%} in the median and {max(wire):.2%} at most."
    spreads = [each.spread for each in found]
    yield f"Measured steps of a layout spread by {np.median(spreads):.1%} (half the distance between the quartiles)."


def _errors(cell: Sequence[Compared]) -> str:
    """Median and 90th percentile of the planner's error, and of a model that knows only the MFU of the median
    layout."""
    errors = [abs(each.error) for each in cell]
    constant = []
    for each in cell:
        alike = statistics.median(other.measured for other in cell if other.model == each.model)
        constant.append(abs(alike / each.measured - 1))
    return " | ".join(
        f"{100 * value:.1f} %"
        for values in (errors, constant)
        for value in (np.median(values), np.percentile(values, 90))
    )


def _tau(cell: Sequence[Compared]) -> float:
    return tau(np.array([each.predicted for each in cell]), np.array([each.measured for each in cell]))


def _place_of_best(cell: Sequence[Compared]) -> int:
    """The place, from 1, of the truly fastest layout in the predicted order."""
    order = sorted(cell, key=lambda each: each.predicted)
    return order.index(min(cell, key=lambda each: each.measured)) + 1


def _table(cell: Sequence[Compared]) -> Iterator[str]:
    yield "| layout | measured s | spread | predicted s | error | part predicted worst, points | bytes |"
    yield "|---|---|---|---|---|---|---|"
    for each in sorted(cell, key=lambda each: each.measured):
        kind, points = each.farthest
        wire = "-" if each.wire_error is None else f"{each.wire_error:+.2%}"
        yield (
            f"| {each.layout} | {each.measured:.3f} | {each.spread:.1%} | {each.predicted:.3f} | {each.error:+.1%} | "
            f"{kind} {points:+.1f} | {wire} |"
        )


def draw(found: Sequence[Compared], path: Path) -> None:
    """Plots predicted against measured seconds, as PNG."""
    figure, axes = plt.subplots(figsize=(6.5, 6.0))
    seconds = [value for each in found for value in (each.measured, each.predicted)]
    low, high = 0.9 * min(seconds), 1.1 * max(seconds)
    ends = np.array([low, high])
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    for model, rate, cell in _cells(found):
        axes.scatter(
            [each.measured for each in cell],
            [each.predicted for each in cell],
            marker=_MARKERS[model],
            color=_COLORS[rate],
            s=22,
            alpha=0.8,
            label=f"{model}, {rate:g} Mbit/s",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("predicted step (s)")
    axes.set_title("Steps on emulated hosts: predicted from a profile, and measured")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
