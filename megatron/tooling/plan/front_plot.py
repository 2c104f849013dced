"""Throughput against memory of all candidates of a search, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.tooling.plan.front import CHOSEN, FEW, INK, LINE, MANY, PALE, POINT, FrontPicture

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


def draw_front(path: Path, picture: FrontPicture) -> None:
    """Writes a PNG of 1600 x 1152 pixels to `path`, and makes its folder. Raises OSError."""
    # Imported here because it takes a second, and most searches need no picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 7.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    counts = picture.cloud()
    axes.imshow(
        np.ma.masked_equal(np.log1p(counts), 0),
        origin="lower",
        extent=(0, picture.right, 0, picture.top),
        aspect="auto",
        cmap=LinearSegmentedColormap.from_list("cloud", [FEW, MANY]),
        interpolation="nearest",
        zorder=1,
    )
    axes.axvspan(picture.limit, picture.right, color="white", alpha=0.55, zorder=2, linewidth=0)
    axes.axvline(picture.limit, color=PALE, linestyle=(0, (5, 4)), linewidth=1.2, zorder=3)
    axes.plot(
        [mark.memory for mark in picture.exact],
        [mark.rate for mark in picture.exact],
        linestyle="none",
        marker="o",
        markersize=3.2,
        color=POINT,
        markeredgecolor="white",
        markeredgewidth=0.3,
        zorder=4,
    )
    x, y = zip(*picture.steps(), strict=True)
    axes.plot(x, y, color=LINE, linewidth=1.8, solid_joinstyle="round", zorder=5)
    for number, (x_label, y_label) in enumerate(picture.label_places()):
        mark = picture.best[number]
        axes.plot([mark.memory, x_label], [mark.rate, y_label], color=CHOSEN, linewidth=0.7, zorder=6)
        axes.plot([mark.memory], [mark.rate], marker="o", markersize=5, color=CHOSEN, markeredgecolor="white", zorder=7)
        axes.plot([x_label], [y_label], marker="o", markersize=11, color=CHOSEN, markeredgecolor="white", zorder=7)
        axes.annotate(
            str(number + 1),
            (x_label, y_label),
            ha="center",
            va="center_baseline",
            color="white",
            fontsize=7.5,
            fontweight="bold",
            zorder=8,
        )
    figure.legend(handles=_handles(picture), loc="outside lower left", fontsize=8.5, labelcolor=INK, frameon=False)
    _dress(axes, picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _dress(axes: Axes, picture: FrontPicture) -> None:
    axes.set_xlim(0, picture.right)
    axes.set_ylim(0, picture.top)
    axes.set_xlabel("peak memory of the fullest rank (GiB)", color=INK)
    axes.set_ylabel("tokens/s per GPU", color=INK)
    axes.set_title(picture.title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.text(
        picture.limit, 0.012 * picture.top, f" {picture.limit:.0f} GiB", color=PALE, fontsize=8.5, va="bottom", zorder=6
    )
    axes.grid(color="#e9e9e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=INK)


def _handles(picture: FrontPicture) -> list[Artist]:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    dots: dict[str, Any] = {"marker": "o", "linestyle": "none"}
    return [
        *(
            Line2D([], [], color=CHOSEN, markersize=6, label=f"{number}  {mark.words}", **dots)
            for number, mark in enumerate(picture.best, start=1)
        ),
        Line2D([], [], color=LINE, linewidth=1.8, label="the most throughput within each amount of memory"),
        Line2D([], [], color=POINT, markersize=3.5, label="exact figures", **dots),
        Patch(color=MANY, label=f"bounds of all {len(picture.memory):,} candidates"),
    ]
