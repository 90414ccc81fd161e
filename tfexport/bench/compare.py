"""Compare two reports, and check conditions on the change of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from tfexport._io.strict_json import parse_json
from tfexport.bench._report import SCHEMA
from tfexport.bench.show import grid, number
from tfexport.errors import BenchError, ConfigError, raise_all, shortened

MAX_BYTES = 16 * 1024 * 1024
_SETTINGS = "backend device variant engine batch_size source_length target_length num_beams rate input"
# Two reports must agree in these fields, unless --vary names them.
FIELDS: dict[str, tuple[Any, ...]] = {
    "bundle": ("bundle", "sha256"),
    "scenario": ("scenario",),
    **{name: ("settings", name) for name in _SETTINGS.split()},
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
    """A change that fails a comparison, such as output_token_throughput<-5%."""

    metric: str
    column: str  # empty for the value of a metric, or its p50 if it has no value
    sign: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition; raise `ConfigError` if it is not valid."""
        match = _CONDITION.fullmatch("".join(text.split()))
        if match is None:
            examples = "output_token_throughput<-5% or request_latency.p99>10%"
            expected = f"a metric, < or >, and a change in percent, such as {examples}"
            raise ConfigError(f"fail-if: {shortened(text)}, expected {expected}")
        return cls(match[1], match[2] or "", match[3], float(match[4]))


def read_result(path: Path) -> dict[str, Any]:
    """Read a report; raise `BenchError` if the file is not one."""
    try:
        if not path.is_file():
            raise BenchError(f"{path}: is not a plain file; write a report with tfexport bench BUNDLE --json {path}")
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
    if isinstance(settings := data.get("settings"), dict) and "form" in settings:  # a report of an earlier version
        settings["variant"] = settings.pop("form")
    return data


def compare(
    first: dict[str, Any], second: dict[str, Any], conditions: Sequence[Condition] = (), vary: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return lines that compare a report with a baseline, and conditions that hold."""
    unknown = [f"{name} is unknown, expected one of {', '.join(FIELDS)}" for name in vary if name not in FIELDS]
    raise_all(ConfigError, "vary", unknown)
    try:
        fields = {name: (reduce(getitem, keys, first), reduce(getitem, keys, second)) for name, keys in FIELDS.items()}
        differing = {name: (shortened(a), shortened(b)) for name, (a, b) in fields.items() if a != b}
        if strange := [name for name in differing if name not in vary]:
            shown = "; ".join(f"{name} is {' and '.join(differing[name])}" for name in strange)
            remedy = f"use the same settings, or allow the difference with --vary {','.join(strange)}"
            raise BenchError(f"bench compare: the reports measure different things: {shown}; {remedy}")
        if len(first["cells"]) != len(second["cells"]):
            raise BenchError("bench compare: the reports have different sizes; measure both with the same ones")
        pairs = list(zip(first["cells"], second["cells"], strict=True))
        lines = [f"{name}: {' → '.join(both)}" for name, both in differing.items()]
        for name, result in (("first", first), ("second", second)):
            lines += [f"the {name} is INVALID: {str(reason)[:300]}" for reason in result["validity"]["reasons"]]
        lines += [*([""] if lines else []), *_table(first, second, pairs)]
        failures = [failure for condition in conditions for failure in _failures(condition, first, second, pairs)]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BenchError(f"bench compare: a report is damaged ({error!r}); measure again") from error
    return lines, failures


def _table(first: dict[str, Any], second: dict[str, Any], pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    is_sweep, rows = len(pairs) > 1, [["", "unit", "first", "second", "change", ""]]
    for one, other in pairs if is_sweep else [(first, second)]:
        prefix = f"{_sizes(one)} " if is_sweep else ""
        for name, columns in (_SHOWN_IN_SWEEP if is_sweep else _SHOWN).items():
            a, b = one["metrics"][name], other["metrics"][name]
            for column in columns.split():
                if (change := _change(a.get(column), b.get(column))) is not None:
                    label = f"{prefix}{name}" + ("" if column == "value" else f" {column}")
                    numbers = number(a[column]), number(b[column])
                    rows.append([label, a["unit"], *numbers, f"{change:+.1f} %", _noise(a, b, column)])
    return grid(rows)


def _noise(first: dict[str, Any], second: dict[str, Any], column: str) -> str:
    # If the values of the processes overlap, the change may be chance.
    a, b = first.get("per_process", []), second.get("per_process", [])
    if column not in ("value", "p50") or len(a) < 2 or len(b) < 2:
        return ""
    return "within the spread" if min(a) <= max(b) and min(b) <= max(a) else ""


def _failures(
    condition: Condition, first: dict[str, Any], second: dict[str, Any], pairs: Sequence[tuple[Any, Any]]
) -> Iterator[str]:
    in_cells = condition.metric in pairs[0][0]["metrics"]
    for one, other in pairs if in_cells else [(first, second)]:
        a, b = (report["metrics"].get(condition.metric) for report in (one, other))
        if a is None or b is None:
            known = ", ".join(sorted(first["metrics"]))
            raise BenchError(f"fail-if: {condition.metric} is unknown, expected one of {known}")
        column = condition.column or ("value" if "value" in a else "p50")
        change = _change(a.get(column), b.get(column))
        if change is None:
            why = a.get("note") or b.get("note") or "it is null or 0"
            raise BenchError(f"fail-if: {condition.metric}.{column} cannot be compared: {why}")
        if change < condition.percent if condition.sign == "<" else change > condition.percent:
            where = f" at {_sizes(one)}" if len(pairs) > 1 and in_cells else ""
            limit = f"the limit is {condition.percent:+g} %"
            yield f"{condition.metric}.{column} changed by {change:+.1f} %{where}, {limit}"


def _sizes(cell: dict[str, Any]) -> str:
    return "/".join(str(cell.get(name) or "all") for name in ("source_length", "target_length", "batch_size"))


def _change(first: float | None, second: float | None) -> float | None:
    return None if not first or second is None else 100 * (second / first - 1)
