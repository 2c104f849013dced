"""Draws training and validation loss over iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[int, float]  # (iteration, loss)

SMOOTH_FROM = 100  # number of points; a shorter curve is drawn without smoothing
TRAIN, VALIDATION, REFERENCE, INK = "#2a6fbb", "#d1495b", "#777777", "#333333"


def draw_loss_curve(
    path: Path,
    train: Sequence[Point],
    validation: Sequence[Point] = (),
    reference: tuple[str, float] | None = None,
    title: str = "",
) -> None:
    """Writes a PNG of 1600 x 900 pixels to `path`, creating its folder.

    `reference` is the label and height of a horizontal line, such as the entropy of the tokens' frequencies. Points
    that are not finite are skipped. A long training curve is drawn pale, with its moving average over 2 % of its
    points.
    """
    figure, axes = _picture()
    _draw_train(axes, _finite(train))
    _draw_validation(axes, _finite(validation))
    if reference is not None:
        label, height = reference
        axes.axhline(height, color=REFERENCE, linestyle=(0, (5, 4)), linewidth=1.2, label=f"{label} ({height:.3f})")
    _dress(axes, "iteration", "loss (nats per token)", title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_curve(path: Path, points: Sequence[Point], x_label: str, y_label: str, title: str) -> None:
    """Writes a PNG of one curve, as `draw_loss_curve` does."""
    figure, axes = _picture()
    axes.plot(*_finite(points), color=TRAIN, linewidth=1.8, marker="o", markersize=4)
    _dress(axes, x_label, y_label, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _picture() -> tuple[Figure, Axes]:
    # Imported here because every run would start one second later for a picture that few request.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 5.625), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean over up to `width` values around each. [n] -> [n]

    The window reaches back at most an eighth of the distance to the start, so that it keeps the steep beginning, and is
    truncated at the end.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(width // 2, index // 8)
    first, last = index - reach, np.minimum(index + reach, len(values) - 1)
    averages: np.ndarray = (sums[last + 1] - sums[first]) / (last + 1 - first)
    return averages


def _finite(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    finite = [(iteration, loss) for iteration, loss in points if math.isfinite(loss)]
    return np.array([p[0] for p in finite]), np.array([p[1] for p in finite], dtype=float)


def _draw_train(axes: Axes, points: tuple[np.ndarray, np.ndarray]) -> None:
    iterations, losses = points
    if not len(losses):
        return
    smooth = losses
    if len(losses) >= SMOOTH_FROM:
        axes.plot(iterations, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
        smooth = moving_average(losses, len(losses) // 50 | 1)
    marker = "o" if len(losses) == 1 else None
    axes.plot(iterations, smooth, color=TRAIN, linewidth=1.8, marker=marker, label=f"training (last {smooth[-1]:.3f})")


def _draw_validation(axes: Axes, points: tuple[np.ndarray, np.ndarray]) -> None:
    iterations, losses = points
    if len(losses):
        label = f"validation (last {losses[-1]:.3f})"
        axes.plot(iterations, losses, color=VALIDATION, linewidth=1.0, marker="o", markersize=3.5, label=label)


def _dress(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=INK)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="upper right", labelcolor=INK, facecolor="white", edgecolor="none", framealpha=1
        )
