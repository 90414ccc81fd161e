"""Render results as HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# Transparent colors and inherited text colors suit light and dark themes.
_BORDER = "border: 1px solid rgba(128, 128, 128, .4); padding: 2px 8px"
_MARKS = {"✓": "rgba(46, 160, 67, .35)", "✗": "rgba(248, 81, 73, .45)"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table; cells "✓" and "✗" are green and red."""
    head = _row(_cell(column, tag="th") for column in columns)
    body = (_row(_cell(value, _MARKS.get(str(value), "")) for value in row) for row in rows)
    return _table(caption, head, *body)


def heat_map(columns: Sequence[object], rows: Sequence[object], weights: Any) -> str:
    """Return a table of weights [rows, columns] from 0 to 1, darker for larger ones."""
    head = _row(_cell(column, tag="th") for column in ("", *columns))
    body = (
        _row((_cell(label, tag="th"), *(_cell(f"{one:.2f}", f"rgba(56, 132, 255, {0.8 * one:.3f})") for one in row)))
        for label, row in zip(rows, weights, strict=True)
    )
    return _table("", head, *body)


def _table(caption: str, *rows: str) -> str:
    title = f'<caption style="text-align: left; white-space: pre-wrap">{escape(caption)}</caption>' if caption else ""
    return f'<table style="border-collapse: collapse; color: inherit">{title}{"".join(rows)}</table>'


def _row(cells: Iterable[str]) -> str:
    return f'<tr style="background: none">{"".join(cells)}</tr>'


def _cell(value: object, background: str = "", *, tag: str = "td") -> str:
    color = f"; background: {background}" if background else ""
    return f'<{tag} style="{_BORDER}; text-align: left; white-space: pre-wrap{color}">{escape(str(value))}</{tag}>'
