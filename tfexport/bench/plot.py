"""Plots as SVG, drawn here: colours are classes of the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 16, 38
# Colours of the style sheet; further series repeat them.
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class _Axes:
    """Where values lie on the picture, and how its axes are called."""

    low: float
    high: float
    top: float
    x_title: str
    y_title: str

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / (self.top or 1) * (HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_ticks: Mapping[float, str]) -> str:
        """Draw grid, ticks and titles."""
        bottom = HEIGHT - _BOTTOM
        parts = []
        for tick in ticks(0, self.top):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
        for value, label in x_ticks.items():
            x = self.x(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(label)}</text>'
            )
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(self.x_title)}</text>'
        )
        parts.append(f'<text class="name" x="{_LEFT}" y="10">{escape(self.y_title)}</text>')
        return "".join(parts)


def histogram(edges: Sequence[float], counts: Sequence[float], marks: Mapping[str, float]) -> str:
    """Draw bars, with a line at each of `marks`.

    Args:
        edges: of the bars, one more than counts.
        counts: height of each bar.
        marks: label and place.
    """
    if not counts:
        return _empty("no latencies")
    axes = _Axes(edges[0], max(edges[-1], *marks.values()), max(counts) * 1.12, "milliseconds, end to end", "count")
    counted = "".join(
        f'<rect class="c0" x="{axes.x(left) + 0.5:.1f}" width="{max(0.5, axes.x(right) - axes.x(left) - 1):.1f}" '
        f'y="{axes.y(count):.1f}" height="{axes.y(0) - axes.y(count):.1f}">'
        f"<title>{_short(left)} to {_short(right)} ms: {count:.0f}</title></rect>"
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
    )
    return _svg("Distribution of latencies", axes.frame(_numbered(axes)) + counted + _marks(axes, marks))


def lines(series: Sequence[Series], title: str, x_title: str, y_title: str, *, ordinal: bool = False) -> str:
    """Draw lines from zero up.

    Args:
        series: at least one point each; at most `COLOURS` can be told apart.
        title: for those who cannot see the picture.
        x_title: below the horizontal axis.
        y_title: above the vertical axis.
        ordinal: place the x values one beside the other instead of to scale.
    """
    values = sorted({x for one in series for x in one.xs})
    if not values:
        return _empty(f"{title}: no values")
    places = {x: float(index) if ordinal else x for index, x in enumerate(values)}
    top = max(y for one in series for y in one.ys) * 1.12
    axes = _Axes(min(places.values()), max(places.values()), top, x_title, y_title)
    x_ticks = {places[x]: _short(x) for x in values} if ordinal else _numbered(axes)
    parts = [axes.frame(x_ticks)]
    for index, one in enumerate(series):
        points = [(axes.x(places[x]), axes.y(y)) for x, y in zip(one.xs, one.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{index % COLOURS}" points="{path}"/>')
        if len(points) <= 32:
            parts += [
                f'<circle class="c{index % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(one.label)} {_short(at)}: {_short(value)}</title></circle>"
                for (x, y), at, value in zip(points, one.xs, one.ys, strict=True)
            ]
    return _svg(title, "".join(parts))


def bars(values: Mapping[str, float]) -> str:
    """Draw one bar for each share, with its label and its percentage."""
    if not values:
        return _empty("not seen from outside the server")
    pitch, left, right = (HEIGHT - 10) / max(1, len(values)), 108, 52
    parts = []
    for index, (label, value) in enumerate(values.items()):
        y, length = 5 + index * pitch, max(0.0, value) * (WIDTH - left - right)
        middle = y + pitch / 2 + 1
        parts.append(f'<text class="tick" x="{left - 8}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect class="c{index % COLOURS}" x="{left}" y="{y:.1f}" width="{max(1.0, length):.1f}" '
            f'height="{pitch - 8:.1f}"/>'
        )
        parts.append(f'<text class="label" x="{left + length + 7:.1f}" y="{middle:.1f}">{100 * value:.1f} %</text>')
    return _svg("Where the time goes", "".join(parts))


def stacks(rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Draw one bar of full width for each row, cut into shares.

    Args:
        rows: label and shares, which add up to 1.
        names: of the shares.
    """
    pitch, left = min(52.0, (HEIGHT - 10) / max(1, len(rows))), 70
    width = WIDTH - _RIGHT - left
    parts = []
    for index, (label, values) in enumerate(rows.items()):
        y, x = 5 + index * pitch, float(left)
        middle, height = y + pitch / 2 + 1, pitch - min(6.0, pitch / 4)
        parts.append(f'<text class="tick" x="{left - 7}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for colour, (name, value) in enumerate(zip(names, values, strict=True)):
            length = max(0.0, value) * width
            parts.append(
                f'<rect class="c{colour % COLOURS}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, length - 1):.1f}" '
                f'height="{height:.1f}"><title>{escape(name)}: {100 * value:.1f} %</title></rect>'
            )
            if length > 38 and pitch > 14:
                parts.append(
                    f'<text class="inside" x="{x + length / 2:.1f}" y="{middle:.1f}" text-anchor="middle">'
                    f"{100 * value:.0f} %</text>"
                )
            x += length
    return _svg("Where the time goes", "".join(parts))


def ticks(low: float, high: float) -> list[float]:
    """Return up to seven round numbers between two."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _numbered(axes: _Axes) -> dict[float, str]:
    return {tick: _short(tick) for tick in ticks(axes.low, axes.high)}


def _marks(axes: _Axes, marks: Mapping[str, float]) -> str:
    """Draw a line with its label at each mark; labels that would meet move down."""
    parts, last, level = [], -math.inf, 0
    for label, value in marks.items():
        x = axes.x(value)
        level = level + 1 if x - last < 34 else 0
        last, y = x, _TOP + 8 + 12 * level
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        side = "end" if x > WIDTH - 50 else "start"
        parts.append(
            f'<text class="label" x="{x + (-4 if side == "end" else 4):.1f}" y="{y}" text-anchor="{side}">'
            f"{escape(label)}</text>"
        )
    return "".join(parts)


def _empty(text: str) -> str:
    return _svg(text, f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">{escape(text)}</text>')


def _svg(title: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
