"""Writes a simulated schedule as a picture and as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.schedule.schedule import COMPUTE, Kind
from megatron.schedule.simulate import ActionInterval, SimulatedTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RGB = tuple[float, float, float]

COLOURS: dict[Kind, RGB] = {
    Kind.FORWARD: (0.16, 0.44, 0.73),
    Kind.BACKWARD: (0.82, 0.29, 0.36),
    Kind.INPUT_GRAD: (0.91, 0.56, 0.20),
    Kind.WEIGHT_GRAD: (0.23, 0.56, 0.40),
    Kind.OFFLOAD: (0.45, 0.36, 0.66),
    Kind.RELOAD: (0.12, 0.62, 0.69),
}
LINES = {Kind.OFFLOAD: 0.47, Kind.RELOAD: 0.54}  # copies are lines below a rank's row, so far from its middle
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward: input",
    Kind.WEIGHT_GRAD: "backward: weights",
    Kind.SEND_FORWARD: "send output",
    Kind.RECV_FORWARD: "receive input",
    Kind.SEND_BACKWARD: "send gradient",
    Kind.RECV_BACKWARD: "receive gradient",
    Kind.OFFLOAD: "offload activations",
    Kind.RELOAD: "reload activations",
}
ROWS = {  # of a trace
    **dict.fromkeys(COMPUTE, "compute"),
    Kind.SEND_FORWARD: "send forward",
    Kind.RECV_FORWARD: "receive forward",
    Kind.SEND_BACKWARD: "send backward",
    Kind.RECV_BACKWARD: "receive backward",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}
INK, EMPTY = "#333333", "#f1f1f1"
WIDTH, DPI = 14.0, 150  # inches, pixels an inch
MARGIN = 1.0  # approximate inches left and right of the rows
ROW, AROUND = 0.42, 1.25  # inches: a row, and title with axis
POINTS = 72.0  # an inch
WHOLE, UPPER_LOWER = (-0.42, 0.84), ((-0.42, 0.42), (0.0, 0.42))  # top and height of a box in a row
PALE = 0.62  # mean of red, green and blue from which numbers are dark
LARGEST, SMALLEST = 9.0, 4.0  # points of the microbatches' numbers; smaller ones are left out


def draw(path: Path, timeline: SimulatedTimeline, title: str) -> None:
    """Writes a PNG to `path`, and makes its folder: one row per rank, one box per action with the microbatch's number.

    Two actions that run together have half of the row each, the first one above. Later chunks of a rank are paler.
    Copies to host memory and back are lines below its row. Raises OSError.
    """
    # Imported here because it takes a second, and most plans need no picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    placement = timeline.schedule.placement
    figure = Figure(figsize=(WIDTH, AROUND + ROW * placement.num_ranks), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank in range(placement.num_ranks):
        axes.broken_barh([(0, timeline.makespan)], (rank - 0.42, 0.84), facecolors=EMPTY)
        _draw_rank(axes, timeline, rank)
    shown = [kind for kind in COLOURS if any(i.action.kind is kind for i in timeline.intervals[0])]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in shown]
    _dress(axes, timeline, title)
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(shown), frameon=False, labelcolor=INK
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_rank(axes: Axes, timeline: SimulatedTimeline, rank: int) -> None:
    schedule = timeline.schedule
    stages = schedule.placement.stages_of(rank)
    computations = timeline.computation(rank)
    narrowest = min(_points(interval, timeline) for interval in computations)
    shades = [_shade(COLOURS[i.action.kind], stages.index(i.action.stage), len(stages)) for i in computations]
    # The top of a box in the row, and its height.
    halves = {half for unit in schedule.units(rank) if len(unit) == 2 for half in zip(unit, UPPER_LOWER, strict=True)}
    band_of = dict(halves)
    bands = [band_of.get(interval.action, WHOLE) for interval in computations]
    for band in dict.fromkeys(bands):
        members = [number for number, other in enumerate(bands) if other == band]
        low, height = band
        axes.broken_barh(
            [(computations[n].start, computations[n].stop - computations[n].start) for n in members],
            (rank + low, height),
            facecolors=[shades[n] for n in members],
            edgecolors="white",
            linewidth=min(0.5, 0.06 * narrowest),
        )
    for kind, place in LINES.items():
        copies = [(i.start, i.stop - i.start) for i in timeline.intervals[rank] if i.action.kind is kind]
        axes.broken_barh(copies, (rank + place - 0.04, 0.06), facecolors=COLOURS[kind])
    longest = len(str(timeline.schedule.num_microbatches - 1))  # digits: so that of one width all are written, or none
    for interval, shade, (low, height) in zip(computations, shades, bands, strict=True):
        size = min(LARGEST, _points(interval, timeline) / (0.72 * longest + 0.25))
        if size >= SMALLEST:
            axes.text(
                (interval.start + interval.stop) / 2,
                rank + low + height / 2,
                str(interval.action.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=INK if sum(shade) / 3 > PALE else "white",
            )


def _points(interval: ActionInterval, timeline: SimulatedTimeline) -> float:
    """Returns the approximate width of the box of an interval, in points."""
    return (interval.stop - interval.start) / timeline.makespan * (WIDTH - MARGIN) * POINTS


def _shade(colour: RGB, chunk: int, chunks: int) -> RGB:
    """Returns the colour mixed with white: not at all for the first chunk, a little more than half for the last."""
    white = 0.55 * chunk / max(chunks - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in colour)
    return red, green, blue


def _dress(axes: Axes, timeline: SimulatedTimeline, title: str) -> None:
    ranks, stages = timeline.schedule.placement.num_ranks, timeline.schedule.placement.num_stages
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("ms" if stages == ranks else "ms (paler: later chunks of a rank's layers)", color=INK)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(colors=INK)
    axes.tick_params(axis="y", length=0)


def write_trace(path: Path, timeline: SimulatedTimeline) -> None:
    """Writes a Chrome trace: one process per rank, with rows for computation, transfers and copies. Raises OSError."""
    events: list[dict[str, Any]] = []
    for rank, intervals in enumerate(timeline.intervals):
        events.append(_label("process_name", f"rank {rank}", rank, 0))
        rows = list(dict.fromkeys(ROWS[kind] for kind in ROWS if any(i.action.kind is kind for i in intervals)))
        events += [_label("thread_name", row, rank, number) for number, row in enumerate(rows)]
        for action, start, stop in intervals:
            events.append(
                {
                    "name": str(action),
                    "cat": NAMES[action.kind],
                    "ph": "X",
                    "ts": round(start * 1e6, 3),
                    "dur": round((stop - start) * 1e6, 3),
                    "pid": rank,
                    "tid": rows.index(ROWS[action.kind]),
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _label(what: str, name: str, rank: int, row: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
