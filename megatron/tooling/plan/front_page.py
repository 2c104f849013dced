"""Throughput against memory of all candidates of a search, as a page that needs no other file and names each point."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

from megatron.tooling.plan.front import CHOSEN, INK, LINE, MANY, PALE, POINT, FrontPicture

WIDTH, HEIGHT, LEFT, BOTTOM, ABOVE = 1000.0, 520.0, 64.0, 52.0, 12.0
TICKS = (1, 2, 2.5, 5)
_STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; max-width: 1060px; margin: 32px auto; padding: 0 16px }}
h1 {{ font-size: 20px }} svg {{ width: 100%; height: auto }} svg text {{ font-size: 13px; fill: {INK} }}
.grid {{ stroke: #e9e9e9 }} .axis {{ stroke: #bbbbbb }} .limit {{ stroke: {PALE}; stroke-dasharray: 6 5 }}
.front {{ stroke: {LINE}; stroke-width: 2.2; fill: none; stroke-linejoin: round }}
circle.front {{ fill: {LINE} }} .beyond {{ fill: white; fill-opacity: .55 }}
.exact {{ fill: {POINT}; stroke: white; stroke-width: .6 }} .best {{ fill: {CHOSEN}; stroke: white }}
.lead {{ stroke: {CHOSEN} }} svg .number {{ fill: white; font-weight: 600; text-anchor: middle; font-size: 12px }}
circle:hover {{ stroke: {INK}; stroke-width: 2 }} .pale {{ color: {PALE} }}
table {{ border-collapse: collapse; width: 100% }} td, th {{ padding: 6px 10px; border-top: 1px solid #e9e9e9 }}
th {{ text-align: left; font-weight: 600 }} .right {{ text-align: right; white-space: nowrap }}
#told {{ min-height: 1.5em }}
"""
# Shows the words of the point under the pointer below the picture, because a title appears late and on desktops only.
_SCRIPT = """
const told = document.getElementById("told"), idle = told.textContent;
document.querySelectorAll("circle").forEach(point => {
  point.addEventListener("mouseenter", () => { told.textContent = point.querySelector("title").textContent });
  point.addEventListener("mouseleave", () => { told.textContent = idle });
});
"""


def write_front_page(path: Path, picture: FrontPicture) -> None:
    """Writes the page to `path`, and makes its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(
        f'<tr><td class="right">{number}</td><td>{escape(mark.words)}</td>'
        f'<td class="right">{mark.rate:.0f}</td><td class="right">{mark.memory:.1f}</td></tr>'
        for number, mark in enumerate(picture.best, start=1)
    )
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(picture.title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(picture.title)}</h1>\n"
        f'<svg viewBox="0 0 {WIDTH + LEFT:g} {HEIGHT + BOTTOM + ABOVE:g}" role="img">'
        f"{''.join(_picture(picture))}</svg>\n"
        '<p id="told" class="pale">Point at a dot to see its layout.</p>\n'
        '<table><tr><th></th><th>layout</th><th class="right">tokens/s per GPU</th><th class="right">GiB</th></tr>'
        f"{rows}</table>\n"
        f'<p class="pale">Grey: bounds of all {len(picture.memory):,} candidates, the darker the more. Light blue: '
        "exact figures. Line: the most throughput within each amount of memory.</p>\n"
        f"<script>{_SCRIPT}</script></body></html>\n",
        encoding="utf-8",
    )


def _picture(picture: FrontPicture) -> Iterator[str]:
    def x(memory: float) -> float:
        return LEFT + WIDTH * memory / picture.right

    def y(rate: float) -> float:
        return ABOVE + HEIGHT * (1 - rate / picture.top)

    for tick in _ticks(picture.top):
        yield f'<line class="grid" x1="{LEFT:g}" x2="{LEFT + WIDTH:g}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text x="{LEFT - 8:g}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for tick in _ticks(picture.right):
        yield f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{ABOVE:g}" y2="{ABOVE + HEIGHT:g}"/>'
        yield f'<text x="{x(tick):.1f}" y="{ABOVE + HEIGHT + 20:g}" text-anchor="middle">{tick:g}</text>'
    yield from _cloud(picture)
    limit = x(picture.limit)
    yield (
        f'<rect class="beyond" x="{limit:.1f}" y="{ABOVE:g}" width="{LEFT + WIDTH - limit:.1f}" height="{HEIGHT:g}"/>'
    )
    yield f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{ABOVE:g}" y2="{ABOVE + HEIGHT:g}"/>'
    yield f'<text x="{limit + 6:.1f}" y="{ABOVE + HEIGHT - 8:g}">{picture.limit:.0f} GiB</text>'
    for mark in picture.exact:
        if mark.memory <= picture.right:
            yield _dot("exact", 3.2, x(mark.memory), y(mark.rate), _told(mark.words, mark.rate, mark.memory))
    points = " ".join(f"{x(memory):.1f},{y(rate):.1f}" for memory, rate in picture.steps())
    yield f'<polyline class="front" points="{points}"/>'
    for mark in picture.front:
        if mark.memory <= picture.right:
            yield _dot("front", 3.2, x(mark.memory), y(mark.rate), _told(mark.words, mark.rate, mark.memory))
    for number, (place, height) in enumerate(picture.label_places(), start=1):
        mark = picture.best[number - 1]
        told = _told(mark.words, mark.rate, mark.memory)
        yield (
            f'<line class="lead" x1="{x(mark.memory):.1f}" y1="{y(mark.rate):.1f}" x2="{x(place):.1f}" '
            f'y2="{y(height):.1f}"/>'
        )
        yield _dot("best", 4.5, x(mark.memory), y(mark.rate), told)
        yield _dot("best", 10, x(place), y(height), told)
        yield f'<text class="number" x="{x(place):.1f}" y="{y(height) + 4:.1f}" pointer-events="none">{number}</text>'
    yield f'<line class="axis" x1="{LEFT:g}" x2="{LEFT + WIDTH:g}" y1="{ABOVE + HEIGHT:g}" y2="{ABOVE + HEIGHT:g}"/>'
    middle = LEFT + WIDTH / 2
    yield (
        f'<text x="{middle:g}" y="{ABOVE + HEIGHT + 44:g}" text-anchor="middle">peak memory of the fullest rank (GiB)'
        f'</text><text transform="translate(14 {ABOVE + HEIGHT / 2:g}) rotate(-90)" text-anchor="middle">'
        "tokens/s per GPU</text>"
    )


def _cloud(picture: FrontPicture) -> Iterator[str]:
    """Fields of the grid of which all have one opacity, as one path each."""
    counts = picture.cloud()
    rows, columns = counts.shape
    wide, high = WIDTH / columns, HEIGHT / rows
    shades = np.ceil(5 * np.log1p(counts) / max(1e-9, float(np.log1p(counts.max(initial=0.0)))))
    for shade in range(1, 6):
        fields = "".join(
            f"M{LEFT + wide * column:.1f} {ABOVE + HEIGHT - high * (row + 1):.1f}h{wide:.2f}v{high:.2f}h-{wide:.2f}z"
            for row, column in np.argwhere(shades == shade)
        )
        if fields:
            yield f'<path fill="{MANY}" fill-opacity="{0.2 + 0.16 * shade:.2f}" d="{fields}"/>'


def _dot(kind: str, radius: float, x: float, y: float, told: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{escape(told)}</title></circle>'


def _told(words: str, rate: float, memory: float) -> str:
    return f"{words}: {rate:.0f} tokens/s per GPU, {memory:.1f} GiB"


def _ticks(end: float) -> list[float]:
    """Returns about six round numbers from 0 to `end`."""
    power = 10.0 ** np.floor(np.log10(end / 6))
    step = next((times * power for times in TICKS if end / (times * power) <= 7), 10 * power)
    return [float(tick) for tick in np.arange(0, end * (1 + 1e-9), step)]
