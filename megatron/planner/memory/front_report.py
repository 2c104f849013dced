"""The Pareto front of what layers keep for backward, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.planner.memory.balance import Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
ROWS = 12  # of the table
LINE, CHOSEN, BUDGET, INK = "#2a6fbb", "#d1495b", "#777777", "#333333"


def table(choices: Sequence[Choice], chosen: Choice, budget: float, base_seconds: float) -> list[str]:
    """Returns lines with some points of the front, the chosen one marked.

    base_seconds: the time of the layers if they keep everything.
    """
    lines = [f"{'MiB kept':>10} {'added time':>11}  layers"]
    for choice in _some(choices, chosen):
        layers = ", ".join(f"{count} x {name}" for name, count in choice.counts().items())
        mark = f"  <- for a budget of {budget / MIB:.1f} MiB" if choice is chosen else ""
        lines.append(f"{choice.nbytes / MIB:10.1f} {choice.seconds / base_seconds:11.1%}  {layers}{mark}")
    return lines


def _some(choices: Sequence[Choice], chosen: Choice) -> list[Choice]:
    """Returns at most ROWS choices, evenly spaced, with both ends and the chosen one."""
    if len(choices) <= ROWS:
        return list(choices)
    last = len(choices) - 1
    numbers = {round(row * last / (ROWS - 2)) for row in range(ROWS - 1)}
    return [choice for number, choice in enumerate(choices) if number in numbers or choice is chosen]


def draw(path: Path, choices: Sequence[Choice], chosen: Choice, budget: float, base_seconds: float) -> None:
    """Writes a PNG of 1600 x 900 pixels to `path`, and makes its folder. Arguments as for `table`. Raises OSError."""
    # Imported here because it takes a second, and few runs ask for a picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 5.625), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, y = _points(choices, base_seconds)
    axes.plot(x, y, color=LINE, linewidth=1.6, marker="o", markersize=3, label="cheapest choices")
    axes.axvline(
        budget / MIB, color=BUDGET, linestyle=(0, (5, 4)), linewidth=1.2, label=f"budget {budget / MIB:.1f} MiB"
    )
    x, y = _points([chosen], base_seconds)
    axes.plot(
        x, y, color=CHOSEN, marker="o", markersize=8, linestyle="none", label=f"taken: {x[0]:.1f} MiB, +{y[0]:.1f} %"
    )
    _dress(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _points(choices: Sequence[Choice], base_seconds: float) -> tuple[list[float], list[float]]:
    return [c.nbytes / MIB for c in choices], [100 * c.seconds / base_seconds for c in choices]


def _dress(axes: Axes) -> None:
    axes.set_xlabel("kept for backward on this rank (MiB)", color=INK)
    axes.set_ylabel("added to the layers' time (%)", color=INK)
    axes.set_title("Activation memory against time", loc="left", color=INK, fontweight="bold")
    axes.margins(x=0.03)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=INK)
    axes.legend(loc="upper right", labelcolor=INK, facecolor="white", edgecolor="none", framealpha=1)
