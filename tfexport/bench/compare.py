"""Two measurements beside one another: is the second better or worse, and may it be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.bench import words
from tfexport.bench.result import SCHEMA
from tfexport.bench.table import grid
from tfexport.errors import BenchError, ConfigError, raise_all, shortened
from tfexport.files.strict_json import parse_json

MAX_BYTES = 16 * 1024 * 1024
# What has to be equal for two measurements to be about the same thing, and where it stands in a report.
FIELDS = {
    "bundle": ("bundle", "sha256"),
    "scenario": ("scenario",),
    "backend": ("settings", "backend"),
    "device": ("settings", "device"),
    "form": ("settings", "form"),
    "engine": ("settings", "engine"),
    "batch_size": ("settings", "batch_size"),
    "source_length": ("settings", "source_length"),
    "target_length": ("settings", "target_length"),
    "num_beams": ("settings", "num_beams"),
    "rate": ("settings", "rate"),
    "input": ("settings", "input"),
    "cpu": ("environment", "cpu"),
    "threads": ("environment", "threads"),
}
_SHOWN = {
    "output_token_throughput": "value",
    "request_throughput": "value",
    "time_to_first_token": "p50",
    "inter_token_latency": "p50",
    "request_latency": "p50 p90 p95 p99",
    "encode_time": "p50",
    "step_time": "p50",
    "load_time": "value",
    "peak_memory": "value",
}
_SHOWN_IN_SWEEP = {"output_token_throughput": "value", "request_latency": "p50"}
_CONDITION = re.compile(r"([a-z_]{1,64})(?:\.(value|avg|min|max|p50|p90|p95|p99))?([<>])([+-]?\d{1,6}(?:\.\d{1,6})?)%")


@dataclass(frozen=True)
class Condition:
    """A change that is not accepted, such as output_token_throughput<-5%.

    Attributes:
        metric: name of the metric.
        column: which of its numbers; "" for its value, or its p50 when it has no value.
        sign: "<" or ">".
        percent: of change from the first measurement to the second.
    """

    metric: str
    column: str
    sign: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            ConfigError: it is none.
        """
        match = _CONDITION.fullmatch("".join(text.split()))
        if match is None:
            raise ConfigError(
                f"fail-if: {shortened(text)}, expected a metric, < or >, and a change in percent, such as "
                "output_token_throughput<-5% or request_latency.p99>10%"
            )
        return cls(match[1], match[2] or "", match[3], float(match[4]))

    def holds(self, change: float) -> bool:
        """Say whether a change in percent is one that is not accepted."""
        return change < self.percent if self.sign == "<" else change > self.percent


@dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        lines: a table for the terminal.
        failures: the conditions that hold, in words.
    """

    lines: tuple[str, ...]
    failures: tuple[str, ...]


def read_result(path: Path) -> dict[str, Any]:
    """Read a report and check what comparing needs.

    Raises:
        BenchError: it is missing, too large or no report.
    """
    try:
        if not path.is_file():
            raise BenchError(f"{path}: is no plain file; write one with: tfexport bench BUNDLE --json {path}")
        if path.stat().st_size > MAX_BYTES:
            raise BenchError(f"{path}: has {path.stat().st_size} bytes, the limit is {MAX_BYTES}; check the file")
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except ValueError as error:
        raise BenchError(f"{path}: is not JSON ({error}); measure again") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = shortened(data.get("schema") if isinstance(data, dict) else data)
        raise BenchError(f"{path}: schema is {got}, expected {SCHEMA!r}; measure again with this version")
    raise_all(BenchError, f"{path} is damaged, measure again", list(_problems(data)))
    return data


def compare(
    first: dict[str, Any], second: dict[str, Any], conditions: Sequence[Condition] = (), vary: Sequence[str] = ()
) -> Comparison:
    """Compare two reports.

    Args:
        first: what is compared with.
        second: what is judged.
        conditions: changes that are not accepted, in any cell.
        vary: fields that may differ because they are what is compared.

    Raises:
        BenchError: they measure different things, or lack a metric of a condition.
        ConfigError: an unknown field in `vary`.
    """
    unknown = [f"{name} is no field, expected one of {', '.join(FIELDS)}" for name in vary if name not in FIELDS]
    raise_all(ConfigError, "vary", unknown)
    differing = [name for name, place in FIELDS.items() if _at(first, place) != _at(second, place)]
    refused = [name for name in differing if name not in vary]
    if refused or len(first["cells"]) != len(second["cells"]):
        raise BenchError(_refusal(first, second, refused))
    pairs = list(zip(first["cells"], second["cells"], strict=True))
    lines = [*_head(first, second, differing), *_table(first, second, pairs)]
    failures = [failure for condition in conditions for failure in _failures(condition, first, second, pairs)]
    return Comparison(tuple(lines), tuple(failures))


def _problems(data: dict[str, Any]) -> Iterator[str]:
    """Say what is not as a report has it, as far as comparing reads it."""
    for place in FIELDS.values():
        if _at(data, place) is _ABSENT:
            yield f"{'.'.join(place)} is missing"
    if not isinstance(_at(data, ("validity", "reasons")), list):
        yield "validity.reasons is no list"
    cells = data.get("cells")
    if not isinstance(cells, list) or not cells:
        yield "cells is no list of measurements"
        return
    for name, holder in (("metrics", data), *((f"cells.{index}.metrics", cell) for index, cell in enumerate(cells))):
        metrics = holder.get("metrics") if isinstance(holder, dict) else None
        if not isinstance(metrics, dict) or not all(map(_is_metric, metrics.values())):
            yield f"{name} is no object of metrics"
        elif not set(_SHOWN_IN_SWEEP) <= set(metrics):
            yield f"{name} lacks one of {', '.join(_SHOWN_IN_SWEEP)}"


def _is_metric(metric: object) -> bool:
    if not isinstance(metric, dict) or not isinstance(metric.get("unit"), str):
        return False
    per_process = metric.get("per_process", [])
    numbers = [item for key, item in metric.items() if key not in ("unit", "note", "per_process")]
    return isinstance(per_process, list) and all(
        item is None or (isinstance(item, int | float) and abs(item) < math.inf) for item in (*numbers, *per_process)
    )


_ABSENT = object()


def _at(data: Any, place: Sequence[str]) -> Any:
    for key in place:
        data = data.get(key, _ABSENT) if isinstance(data, dict) else _ABSENT
    return data


def _refusal(first: dict[str, Any], second: dict[str, Any], fields: Sequence[str]) -> str:
    if not fields:
        return (
            f"bench compare: the first has {len(first['cells'])} combinations and the second {len(second['cells'])}; "
            "measure both with the same sizes"
        )
    shown = "; ".join(
        f"{name} is {shortened(_at(first, FIELDS[name]))} and {shortened(_at(second, FIELDS[name]))}" for name in fields
    )
    return (
        f"bench compare: the two measure different things: {shown}; measure both alike, or, where the difference is "
        f"what you compare, say --vary {','.join(fields)}"
    )


def _head(first: dict[str, Any], second: dict[str, Any], differing: Sequence[str]) -> list[str]:
    lines = [
        f"{name}: {shortened(_at(first, FIELDS[name]))} → {shortened(_at(second, FIELDS[name]))}" for name in differing
    ]
    for name, result in (("first", first), ("second", second)):
        lines += [f"the {name} is not valid: {shortened(reason)}" for reason in result["validity"]["reasons"]]
    return [*lines, ""] if lines else []


def _table(first: dict[str, Any], second: dict[str, Any], pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    rows = [["", "unit", "first", "second", "change", ""]]
    if len(pairs) > 1:
        for a, b in pairs:
            rows += _rows(a["metrics"], b["metrics"], _SHOWN_IN_SWEEP, f"{_sizes(a)} ")
    else:
        rows += _rows(first["metrics"], second["metrics"], _SHOWN, "")
    return grid(rows)


def _rows(first: Any, second: Any, shown: dict[str, str], prefix: str) -> Iterator[list[str]]:
    for name, columns in shown.items():
        a, b = first.get(name, {}), second.get(name, {})
        for column in columns.split():
            change = _change(a.get(column), b.get(column))
            if change is not None:
                label = f"{prefix}{name}" + ("" if column == "value" else f" {column}")
                numbers = words.number(a[column]), words.number(b[column])
                yield [label, a["unit"], *numbers, f"{change:+.1f} %", _noise(a, b, column)]


def _noise(first: dict[str, Any], second: dict[str, Any], column: str) -> str:
    """Say when what processes measured overlaps, so that the change may be chance."""
    a, b = first.get("per_process", []), second.get("per_process", [])
    if column not in ("value", "p50") or len(a) < 2 or len(b) < 2:
        return ""
    return "within the spread" if min(a) <= max(b) and min(b) <= max(a) else ""


def _failures(
    condition: Condition, first: dict[str, Any], second: dict[str, Any], pairs: Sequence[tuple[Any, Any]]
) -> Iterator[str]:
    in_cells = condition.metric in pairs[0][0]["metrics"]
    for a, b in pairs if in_cells else [(first, second)]:
        metric, other = a["metrics"].get(condition.metric), b["metrics"].get(condition.metric)
        if metric is None or other is None:
            known = ", ".join(sorted(first["metrics"]))
            raise BenchError(f"fail-if: no metric {condition.metric} in both; there are {known}")
        column = condition.column or ("value" if "value" in metric else "p50")
        change = _change(metric.get(column), other.get(column))
        if change is None:
            why = metric.get("note") or other.get("note") or "it is null or 0"
            raise BenchError(f"fail-if: {condition.metric}.{column} cannot be compared: {why}")
        if condition.holds(change):
            where = f" at {_sizes(a)}" if len(pairs) > 1 and in_cells else ""
            yield (
                f"{condition.metric}.{column} changed by {change:+.1f} %{where}, the limit is {condition.percent:+g} %"
            )


def _sizes(cell: dict[str, Any]) -> str:
    return "/".join(str(cell.get(name) or "all") for name in ("source_length", "target_length", "batch_size"))


def _change(first: float | None, second: float | None) -> float | None:
    return None if not first or second is None else 100 * (second / first - 1)
