"""Render results as HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Transparent colors and inherited text colors suit light and dark themes.
_CELL = "border: 1px solid rgba(128, 128, 128, .4); padding: 2px 8px; text-align: left; white-space: pre-wrap"
_MARKS = {"✓": "rgba(46, 160, 67, .35)", "✗": "rgba(248, 81, 73, .45)"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table; cells "✓" and "✗" are green and red."""
    return _table(columns, ([_cell(value, _MARKS.get(str(value), "none")) for value in row] for row in rows), caption)


def heat_map(columns: Sequence[object], rows: Sequence[object], weights: Any) -> str:
    """Return a table of weights [rows, columns] from 0 to 1, stronger for larger ones."""
    body = (
        [_cell(label, tag="th"), *(_cell(f"{weight:.2f}", f"rgba(56, 132, 255, {0.8 * weight:.3f})") for weight in row)]
        for label, row in zip(rows, weights, strict=True)
    )
    return _table(["", *columns], body)


def _table(columns: Sequence[object], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    lines = [[_cell(column, tag="th") for column in columns], *rows]
    title = f'<caption style="text-align: left; white-space: pre-wrap">{_escaped(caption)}</caption>' if caption else ""
    body = "".join(f'<tr style="background: none">{"".join(line)}</tr>' for line in lines)
    return f'<table style="border-collapse: collapse; color: inherit">{title}{body}</table>'


def _cell(value: object, color: str = "none", *, tag: str = "td") -> str:
    return f'<{tag} style="{_CELL}; background: {color}">{_escaped(str(value))}</{tag}>'


def _escaped(text: str) -> str:
    from html import escape  # with a table of entities, which processes that print no HTML do not need

    return escape(text)
