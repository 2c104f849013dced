"""The layouts that a search found, as a table and as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.planner.search.search import PlannedLayout
from megatron.planner.time.groups import GROUPS, grouped
from megatron.planner.time.hardware import BF16, GIB, TERA, Cluster
from megatron.planner.time.step_time import StepTime
from megatron.tooling.plan.try_runs import Trial
from megatron.tooling.plan.words import mesh_words, method_words

DAY = 86400.0
# Of each group: its colour, and its mark where there are none.
STYLES: Mapping[str, tuple[str, str]] = {
    "compute": ("#4878a8", "█"),
    "recompute": ("#8fb3d6", "▓"),
    "tp": ("#d1495b", "t"),
    "cp": ("#e07a5f", "c"),
    "ep": ("#b56576", "e"),
    "dp": ("#e9a23b", "d"),
    "pp": ("#b07aa1", "p"),
    "offload": ("#76b7b2", "h"),
    "bubble": ("#c9c9c9", "░"),
    "optimizer": ("#59a14f", "▒"),
    "other": ("#8c8c8c", "·"),
}
NARROW = 20  # characters that a row of bars needs for its number, seconds and margins
SHOWN = 0.0005  # smallest share of a step that is written out


def days(time: StepTime, tokens: float) -> float:
    """Returns days of training on so many tokens."""
    return tokens / (float(time.tokens_per_second) * time.ranks) / DAY


def mfu(time: StepTime, cluster: Cluster) -> float:
    """Returns model FLOP/s in units of the dense bf16 peak."""
    return float(time.flops_per_second) / cluster.device.flops(BF16)


def table_of(
    planned: Sequence[PlannedLayout], cluster: Cluster, limit: float, *, tokens: float | None, errors: bool
) -> Table:
    """Returns a table with a row per layout. limit: bytes of device memory that a layout may take. tokens: the tokens
    of the whole training, None if unknown. errors: whether to print the errors of the step times."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    hosts = any(layout.host for layout in planned)
    table.add_column("", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    for heading in (
        *(
            "step\ns",
            *(["±\ns"] if errors else []),
            "tokens/s\nper GPU",
            "TFLOP/s\nper GPU",
            "MFU\n%",
            f"GiB\nof {limit / GIB:.0f}",
        ),
        *(["host\nGiB"] if hosts else []),
        *(["days"] if tokens is not None else []),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, layout in enumerate(planned, start=1):
        words = Text(mesh_words(layout.layout, layout.time.ranks), style="bold")
        words.append("\n" + method_words(layout.layout, layout.time.ranks), style="not bold dim")
        cells = [
            seconds_text(float(layout.time.seconds)),
            *([seconds_text(layout.error * float(layout.time.seconds))] if errors else []),
            f"{float(layout.time.tokens_per_second):.0f}",
            f"{float(layout.time.flops_per_second) / TERA:.0f}",
            f"{100 * mfu(layout.time, cluster):.1f}",
            f"{layout.memory / GIB:.1f}",
        ]
        if hosts:
            cells.append(f"{layout.host / GIB:.1f}")
        if tokens is not None:
            cells.append(days_text(days(layout.time, tokens)))
        table.add_row(str(number), words, *cells)
    return table


def seconds_text(seconds: float) -> str:
    """Returns seconds with about three digits."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def days_text(days: float) -> str:
    """Returns days with about three digits."""
    return f"{days:.2f}" if days < 10 else f"{days:.1f}" if days < 100 else f"{days:,.0f}"


def print_bars(console: Console, planned: Sequence[PlannedLayout]) -> None:
    """Prints a bar per layout, scaled to the slowest, and below it the share of each group of parts."""
    room = console.width - NARROW
    slowest = max(float(layout.time.seconds) for layout in planned)
    used: dict[str, None] = {}
    for number, layout in enumerate(planned, start=1):
        groups = grouped(layout.time.parts)
        bar = Text(f"{number:3}  ")
        for group, cells in _cells(groups, room / slowest).items():
            used[group] = None
            bar.append_text(_piece(console, group, cells))
        bar.append(f"  {seconds_text(float(layout.time.seconds))} s")
        console.print(bar, no_wrap=True, overflow="crop")
        whole = float(layout.time.seconds)
        shares = [f"{group} {seconds / whole:.1%}" for group, seconds in groups.items() if seconds >= SHOWN * whole]
        console.print(Text("     " + "  ".join(shares), style="dim"))
    legend = Text("     ")
    for group in (group for group in GROUPS if group in used):
        legend.append_text(_piece(console, group, 2 if console.color_system else 1))
        legend.append(f" {group}   ")
    console.print(legend)


def _piece(console: Console, group: str, cells: int) -> Text:
    colour, mark = STYLES[group]
    return Text(cells * "█", style=colour) if console.color_system else Text(cells * mark)


def _cells(groups: Mapping[str, float], scale: float) -> dict[str, int]:
    """Returns the width of each group in characters. Ends are rounded, not widths, so that the bar has the right
    length."""
    widths, done, drawn = {}, 0.0, 0
    for group, seconds in groups.items():
        done += max(0.0, seconds)
        end = round(done * scale)
        if end > drawn:
            widths[group], drawn = end - drawn, end
    return widths


def print_trial(console: Console, trial: Trial) -> None:
    """Prints what layouts took that were run, and the order of all by the predictions that they correct."""
    order = trial.corrected
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("layout", "predicted s", "measured s", "corrected s"):
        table.add_column(heading, justify="right")
    for place in order.order:
        measured = trial.measured.get(place)
        shown = seconds_text(measured) if measured is not None else "failed" if place in trial.failed else ""
        table.add_row(str(place + 1), seconds_text(trial.predicted[place]), shown, seconds_text(order.seconds[place]))
    console.print(table)
    console.print(
        f"measured steps take {order.factor:.3f} times as long as predicted; the layouts are in their new order",
        soft_wrap=True,
    )
    for place, why in sorted(trial.failed.items()):
        console.print(f"layout {place + 1} did not run: {why}", soft_wrap=True, markup=False)
