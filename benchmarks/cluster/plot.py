"""Plots the table: the distance of each system from the bound, by the links' rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.cluster.figures import Row

MARKERS = "osD^v<>Ph"
TICKS = (0.5, 0.7, 1.0, 1.15, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plots step time as a multiple of the bound, one panel per (hosts, microbatches), and writes it to `path` as PNG.

    Seconds differ tenfold between the rates; the multiple shows every cell at one scale. The bound's seconds are below.
    """
    hosts = list(dict.fromkeys(row.cell.hosts for row in rows))
    depths = list(dict.fromkeys(row.cell.accumulation for row in rows))
    systems = [s for s in dict.fromkeys(row.system for row in rows) if s != "compute only"]
    width, height = 1.5 + 5.5 * len(depths), 1.6 + 4.4 * len(hosts)
    figure, axes = plt.subplots(len(hosts), len(depths), figsize=(width, height), squeeze=False)
    for host, line_of_axes in zip(hosts, axes, strict=True):
        for depth, panel in zip(depths, line_of_axes, strict=True):
            here = [row for row in rows if (row.cell.hosts, row.cell.accumulation) == (host, depth)]
            if here:
                _panel(panel, here, systems)
            panel.set_title(f"{host} hosts, {depth} microbatch{'es' if depth > 1 else ''} per step", fontsize=11)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = 4 if len(depths) > 1 else 2
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    lines_of_legend = -(-len(labels) // columns)
    figure.tight_layout(rect=(0, (0.25 + 0.2 * lines_of_legend) / height, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axes: Axes, rows: Sequence[Row], systems: Sequence[str]) -> None:
    of_rate = {row.cell.rate: row for row in rows}
    rates = sorted(of_rate, reverse=True)
    xs = list(range(len(rates)))
    axes.plot(xs, [1.0] * len(xs), "k--", linewidth=1.5, label="bound")
    axes.plot(xs, [of_rate[r].compute / of_rate[r].bound for r in rates], "k:", linewidth=1.5, label="compute only")
    for number, system in enumerate(systems):
        own = sorted((rates.index(row.cell.rate), row.step / row.bound) for row in rows if row.system == system)
        ours = system.startswith("ours")
        axes.plot(
            *zip(*own, strict=True),
            color=plt.get_cmap("tab10")(number % 10),
            marker=MARKERS[number % len(MARKERS)],
            markersize=7 if ours else 4.5,
            linewidth=2.4 if ours else 1.1,
            label=system,
        )
    axes.set_yscale("log")
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_ylim(0.5, 1.15 * max(row.step / row.bound for row in rows))
    axes.set_xticks(xs, [f"{rate:g} Mbit/s\n{of_rate[rate].bound:.2f} s" for rate in rates])
    axes.set_ylabel("step time / bound")
    axes.grid(axis="y", alpha=0.3)
