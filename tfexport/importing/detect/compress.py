"""Lines of a layout written short: those that differ in one component become one line with lists."""

from __future__ import annotations

from collections.abc import Sequence

# Canonical names in the order of a layout file.
_ORDER = (
    ("enc", "dec", "out"),
    ("embed", "pos", "rel_bias", "emb_norm", "layers", "norm"),
    ("self", "cross", "ffn", "norm1", "norm2", "norm3", "rel_bias"),
    ("q", "k", "v", "o", "fc1", "gate", "fc2"),
    ("weight", "bias"),
)


def compress(lines: Sequence[str]) -> tuple[str, ...]:
    """Write lines that differ in one component on each side as one, with lists.

    Args:
        lines: "SRC -> DST |> ops", without lists.

    Returns:
        Fewer lines with the same meaning.
    """
    rows: list[Row] = []
    for line in sorted(lines, key=_place):
        rule, *ops = line.split(" |> ")
        source, target = rule.split(" -> ")
        rows.append((tuple(source.split(".")), tuple(target.split(".")), tuple(ops)))
    for right in (-1, -2, -3, 0):
        for left in (-1, -2, -3, -4, 0, 1, 2):
            rows = _merged(rows, left, right)
    return tuple(" |> ".join((f"{'.'.join(source)} -> {'.'.join(target)}", *ops)) for source, target, ops in rows)


def _place(line: str) -> list[int]:
    """Return where a line stands in a layout: encoder first, q before k before v."""
    components = line.partition(" -> ")[2].partition(" |> ")[0].split(".")
    return [order.index(c) for c in components for order in _ORDER if c in order]


Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _merged(rows: Sequence[Row], left: int, right: int) -> list[Row]:
    """Merge rows that differ in component `left` of the source and `right` of the target alone."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        source, target, ops = row
        is_plain = -len(source) <= left < len(source) and -len(target) <= right < len(target)
        if is_plain and not set("{[") & {*source[left], *target[right]} and _keeps_order(row, left, right):
            rest = (_without(source, left), len(source), _without(target, right), len(target), ops)
            groups.setdefault(rest, []).append(row)
        else:
            groups.setdefault(row, []).append(row)
    merged = []
    for group in groups.values():
        if len(group) == 1:
            merged += group
            continue
        sources, targets = [row[0][left] for row in group], [row[1][right] for row in group]
        if len(set(sources)) < len(group) or len(set(targets)) < len(group):
            merged += group
            continue
        source, target, ops = group[0]
        merged.append((_with(source, left, sources), _with(target, right, targets), ops))
    return merged


def _keeps_order(row: Row, left: int, right: int) -> bool:
    """The k-th list on the left belongs to the k-th on the right: as many lists have to stand before both."""
    source, target, _ = row
    before = sum("{" in part and "," in part for part in source[: left % len(source)])
    return before == sum("{" in part and "," in part for part in target[: right % len(target)])


def _without(parts: tuple[str, ...], place: int) -> tuple[str, ...]:
    place %= len(parts)
    return (*parts[:place], "\0", *parts[place + 1 :])


def _with(parts: tuple[str, ...], place: int, values: Sequence[str]) -> tuple[str, ...]:
    place %= len(parts)
    return (*parts[:place], "{" + ",".join(values) + "}", *parts[place + 1 :])
