"""A result as one picture in SVG that holds all it needs and follows light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from comparison.markdown import MAIN_PEERS, decoding
from comparison.result import pairs

WIDTH, PITCH, TOP, BOTTOM = 760, 24, 62, 40
LEFT, RIGHT = 150, 24
# Dots of one row stand a little apart, so that those of equal value can be told.
_APART = 5
_TICKS = (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_STYLE = """
svg { --page: #fff; --ink: #1a1d21; --soft: #5c6570; --line: #dde1e6; --c0: #2f6fd6; --c1: #e08a1e; --c2: #2a9d74;
  --c3: #9a5bc8; font: 12px system-ui, sans-serif; background: var(--page); }
@media (prefers-color-scheme: dark) { svg { --page: #14171b; --ink: #e8eaed; --soft: #9aa4b0; --line: #343a42;
  --c0: #6ea3f5; --c1: #f0ab55; --c2: #57c79c; --c3: #bd8ce6; } }
.back { fill: var(--page); } .grid { stroke: var(--line); } .one { stroke: var(--ink); stroke-width: 1.5; }
.tick, .row { fill: var(--soft); } .title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.group { fill: var(--ink); font-weight: 600; } .dot { stroke-width: 1.8; } .span { stroke-width: 1.2; opacity: .45; }
.any { stroke: var(--soft); fill: var(--soft); } .hollow { fill: var(--page); }
"""
_COLOURS = 4
_COLOUR_STYLE = "".join(
    f".s{index} {{ stroke: var(--c{index}); }} .f{index} {{ stroke: var(--c{index}); fill: var(--c{index}); }}\n"
    for index in range(_COLOURS)
)


@dataclass(frozen=True)
class Dot:
    """One ratio with its lowest and highest round."""

    value: float
    low: float
    high: float
    colour: int
    is_hollow: bool
    text: str


@dataclass
class Row:
    """Ratios that stand side by side; without any, a heading."""

    label: str
    dots: list[Dot] = field(default_factory=list)


@dataclass(frozen=True)
class _Axis:
    """The logarithmic axis of ratios."""

    low: float
    high: float

    def x(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        inside = [tick for tick in _TICKS if self.low <= tick <= self.high]
        kept: list[float] = []
        for tick in inside:
            if not kept or self.x(tick) - self.x(kept[-1]) > 30 or tick == 1:
                kept.append(tick)
        return kept


def draw(result: Mapping[str, Any]) -> str:
    """Draw every ratio of a result as a dot, faster to the right.

    Args:
        result: document of `comparison.result.Result`; at least one ratio.
    """
    found = pairs(result)
    batches = sorted({pair["batch_size"] for pair in found})
    sources = sorted({pair["source_length"] for pair in found})
    rows = _rows(found, batches, sources)
    values = [value for row in rows for dot in row.dots for value in (dot.low, dot.high)]
    axis = _Axis(min(0.7, *values) / 1.05, max(2.0, *values) * 1.05)
    height = TOP + PITCH * len(rows) + BOTTOM
    parts = [_frame(axis, height), _legend(batches, sources)]
    parts += [_row(axis, row, TOP + PITCH * index + PITCH / 2) for index, row in enumerate(rows)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="Speed of tfexport relative to other systems"><style>{_STYLE}{_COLOUR_STYLE}</style>'
        f'<rect class="back" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _rows(found: Sequence[Mapping[str, Any]], batches: list[int], sources: list[int]) -> list[Row]:
    """Group the ratios: by model beside CTranslate2, then by system."""
    groups: dict[str, dict[str, Row]] = {}
    for pair in sorted(found, key=lambda pair: pair["peer"] not in MAIN_PEERS):
        is_main = pair["peer"] in MAIN_PEERS
        heading = f"{pair['model']}, beside {MAIN_PEERS[pair['peer']]}" if is_main else f"{pair['peer']}, fp32"
        label = f"{pair['precision'] if is_main else pair['model']} {decoding(pair)}"
        text = (
            f"{pair['model']} {pair['precision']} {decoding(pair)}, source {pair['source_length']}, batch "
            f"{pair['batch_size']}: {pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})"
        )
        dot = Dot(
            pair["ratio"],
            pair["low"],
            pair["high"],
            batches.index(pair["batch_size"]) % _COLOURS,
            pair["source_length"] != sources[0],
            text,
        )
        groups.setdefault(heading, {}).setdefault(label, Row(label)).dots.append(dot)
    return [row for heading, group in groups.items() for row in (Row(heading), *group.values())]


def _frame(axis: _Axis, height: int) -> str:
    bottom = height - BOTTOM
    parts = ['<text class="title" x="14" y="22">How many times as fast as other systems</text>']
    for tick in axis.ticks():
        x, kind = axis.x(tick), "one" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{height - 6}" text-anchor="middle">'
        "their time over ours, logarithmic; lines from the lowest to the highest round</text>"
    )
    return "".join(parts)


def _legend(batches: list[int], sources: list[int]) -> str:
    entries = [(f"f{index % _COLOURS}", f"batch {batch}") for index, batch in enumerate(batches)]
    if len(sources) > 1:
        longer = " and ".join(map(str, sources[1:]))
        entries += [("any", f"source {sources[0]}"), ("any hollow", f"source {longer}")]
    parts, x = [], 18.0
    for shown, label in entries:
        parts.append(f'<circle class="dot {shown}" cx="{x}" cy="40" r="4"/>')
        parts.append(f'<text class="row" x="{x + 9}" y="44">{escape(label)}</text>')
        x += 28 + 7 * len(label)
    return "".join(parts)


def _row(axis: _Axis, row: Row, y: float) -> str:
    if not row.dots:
        return f'<text class="group" x="14" y="{y + 4:.1f}">{escape(row.label)}</text>'
    parts = [f'<text class="row" x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(row.label)}</text>']
    for dot in row.dots:
        x, at = axis.x(dot.value), y + _APART * (dot.colour - 1)
        shown = f"s{dot.colour} hollow" if dot.is_hollow else f"f{dot.colour}"
        parts.append(
            f'<line class="span s{dot.colour}" x1="{axis.x(dot.low):.1f}" x2="{axis.x(dot.high):.1f}" '
            f'y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<circle class="dot {shown}" cx="{x:.1f}" cy="{at:.1f}" r="3.6"><title>{escape(dot.text)}</title></circle>'
        )
    return "".join(parts)
