"""Reports: JSON, table, page and comparison."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench.test_measuring import samples
from tfexport.bench._report import build_result
from tfexport.bench.compare import Condition, compare, read_result
from tfexport.bench.config import BenchConfig
from tfexport.bench.show import lines, render
from tfexport.errors import BenchError, ConfigError

NUMBER = (int, float)
DISTRIBUTION = {
    "unit": str,
    "count": int,
    "per_process": [NUMBER],
    **dict.fromkeys(("avg", "min", "max", "std", "p50", "p90", "p95"), NUMBER),
    "p99": (*NUMBER, type(None)),
}
VALUE = {"unit": str, "value": NUMBER}
RATE = {**VALUE, "per_process": [NUMBER]}
CELL_METRICS: dict[str, Any] = {
    **dict.fromkeys(
        "time_to_first_token inter_token_latency request_latency encode_time step_time".split(), DISTRIBUTION
    ),
    **dict.fromkeys(("output_token_throughput", "request_throughput"), RATE),
    **dict.fromkeys("input_sequence_length output_sequence_length request_count benchmark_duration".split(), VALUE),
}
SERVER_METRICS = {"goodput": RATE, "slot_occupancy": RATE, "queue_time": DISTRIBUTION, "refused": VALUE}
SETTINGS = (
    "backend device variant threads engine batch_size source_length target_length num_beams rate goal_ms slots url "
    "model duration processes seed input"
)
ENVIRONMENT = "date system cpu cores threads python instruction_sets int8_products versions"


def mismatches(value: Any, schema: Any, place: str = "report") -> list[str]:
    """List where a JSON value differs from a schema; a metric may have a `note`."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or set(value) - {"note"} != set(schema):
            return [f"{place}: {sorted(value) if isinstance(value, dict) else value}"]
        return [wrong for key, part in schema.items() for wrong in mismatches(value[key], part, f"{place}.{key}")]
    if isinstance(schema, list) and isinstance(value, list):
        return [wrong for item in value for wrong in mismatches(item, schema[0], f"{place}[]")]
    is_right = not isinstance(schema, list) and isinstance(value, schema)
    return [] if is_right else [f"{place}: {value!r} is no {schema}"]


def check_schema(found: dict[str, Any]) -> None:
    metrics = CELL_METRICS | (SERVER_METRICS if found["scenario"] == "server" else {})
    size = (int, type(None))
    cell = {
        "batch_size": int,
        "source_length": size,
        "target_length": size,
        "metrics": metrics,
        "stable": bool,
        "windows": [[float]],
        "unserved": int,
        "time_split": dict.fromkeys(("encode", "step", "reorder", "rest"), float),
        "latency_histogram": {"edges_ms": [float], "counts": [int]},
    }
    schema = {
        "schema": str,
        "scenario": str,
        "best_cell": int,
        "cells": [cell],
        "bundle": {"name": str, "sha256": str, "precision": str},
        "settings": dict.fromkeys(SETTINGS.split(), object),
        "parity": {"passed": (bool, type(None)), "source": str},
        "environment": dict.fromkeys(ENVIRONMENT.split(), object),
        "validity": {"valid": bool, "reasons": [str]},
        "metrics": metrics | dict.fromkeys(("load_time", "load_to_first_token", "peak_memory"), RATE),
    }
    assert mismatches(found, schema) == []
    assert found["schema"] == "tfexport.bench/2"


def report(
    *, scale: float = 1.0, name: str = "dates", windows: tuple[float, ...] = (10.0, 10.0, 10.0), **config: Any
) -> dict[str, Any]:
    """A report whose times are `scale` times 2 ms a step; a batch of b takes b times as long."""
    batch_size = () if config.get("url") else (config.get("slots", 1),)
    settings = {"batch_size": batch_size, "source_length": (7,), "target_length": (3,), "duration": 1.0, "processes": 2}
    resolved = BenchConfig(**{**settings, **config})
    served = {"queue_s": [0.001, 0.003], "slot_occupancy": 0.25}
    process = {
        "backend": "ort",
        "load_s": 0.2 * scale,
        "load_to_first_token_s": 0.3 * scale,
        "peak_memory_bytes": int(9e7 * scale),
        "cells": [
            samples(*[[0.002 * scale * (cell.batch_size or 1)] * 3] * 20, windows=windows).to_dict()
            | (served if resolved.scenario == "server" else {})
            for cell in resolved.cells
        ],
    }
    if resolved.url:  # then it is the server's, and not seen
        process = {"backend": "http", "model": name, "cells": process["cells"]}
    about = {
        "bundle": {"name": name, "sha256": "ab" * 32, "precision": "fp32"},
        "input": None,
        "environment": {
            "date": "2026-01-02T03:04:05+00:00",
            "system": "Linux 6 x86_64",
            "cpu": "A <fast> one",
            "cores": 4,
            "threads": 2,
            "python": "3.11.7",
            "instruction_sets": ["X86_V3"],
            "int8_products": "exact",
            "versions": {"numpy": "2.0.0"},
        },
    }
    count = resolved.processes
    return build_result(resolved, [process] * count, about, {"passed": True, "source": "checked by its export"})


URL = "http://127.0.0.1:8000"
SWEEP = {"scenario": "sweep", "batch_size": (1, 4, 16), "source_length": (3, 5)}
REPORTS: dict[str, Callable[[], dict[str, Any]]] = {
    "single": report,
    "offline": lambda: report(scenario="offline", batch_size=(8,)),
    "server": lambda: report(scenario="server", slots=4, rate=20.0, goal_ms=50.0),
    "url": lambda: report(scenario="server", url=URL, rate=20.0),
    "sweep": lambda: report(**SWEEP),
    "unstable": lambda: report(windows=(1.0, 2.0)),
}


@pytest.mark.parametrize("name", sorted({*REPORTS} - {"url"}))
def test_a_report_has_the_schema(name: str) -> None:
    check_schema(json.loads(json.dumps(REPORTS[name](), allow_nan=False)))


def test_metrics_unknown_to_a_client_are_null() -> None:
    metrics = REPORTS["url"]()["metrics"]
    assert metrics["load_time"] == {"unit": "ms", "value": None, "note": "not measured with --url"}
    assert metrics["goodput"]["note"] == "needs a goal; set --goal-ms"


def test_a_server_is_judged_by_its_bound() -> None:
    found = report(scenario="server", slots=4, rate=20.0, goal_ms=30.0)
    # 20 requests of 26 ms, one after the other: all in time.
    assert found["metrics"]["goodput"]["value"] == pytest.approx(1 / 0.026)
    assert found["metrics"]["slot_occupancy"]["value"] == 0.25
    text = " ".join("\n".join(lines(found)).split())
    assert "server at 20 requests/s · slots 4" in text
    assert "goodput 38.5 requests a second answered within 30 ms" in text
    assert "slots 25 % in use by a step queue 2.00 ms, p90 3.00" in text
    assert report(scenario="server", slots=4, rate=20.0, goal_ms=20.0)["metrics"]["goodput"]["value"] == 0


def test_doubts_are_reported() -> None:
    assert report()["validity"] == {"valid": True, "reasons": []}
    (reason,) = report(windows=(1.0, 2.0, 3.0))["validity"]["reasons"]
    assert reason.startswith("unstable")
    data = samples([0.01]).to_dict() | {"unserved": 3}
    process = {"backend": "eager", "cells": [data]}
    about = {"bundle": {}, "input": None, "environment": {}}
    found = build_result(BenchConfig(batch_size=(1,)), [process], about, {"passed": None, "source": "not checked"})
    parity, overloaded = found["validity"]["reasons"]
    assert "pass the served BUNDLE" in parity
    assert "lower --rate" in overloaded


# ---- the table


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_the_table_is_aligned_and_narrow(name: str) -> None:
    found = lines(REPORTS[name]())
    assert max(map(len, found)) <= 90
    head = next(i for i, line in enumerate(found) if line.startswith(("milliseconds", "source  ")))
    table = found[head : found.index("", head)]
    place = re.search("p50" if name != "sweep" else r"tokens/s", table[0])
    assert place is not None
    numbers = [line for line in table[1:] if not line.startswith("–")]
    assert len(numbers) == (6 if name == "sweep" else 5)
    assert all(line[place.end() - 1].isdigit() and line[place.end()] == " " for line in numbers)
    assert any(line.startswith("INVALID") for line in found) == (name == "unstable")


def test_the_table_shows_the_numbers() -> None:
    text = "\n".join(lines(report()))
    # 8 ms a request: 1 encoder, 3 · 2 steps, 1 rest.
    for part in (
        "end to end           8.00",
        "375 (375 … 375) a second",
        "decoder steps 75 %",
        "p99 needs 1,000 samples",
    ):
        assert part in text


# ---- the page


@pytest.mark.parametrize("name", ["server", "single", "sweep"])
def test_the_page_is_well_formed_and_self_contained(name: str) -> None:
    page = render(REPORTS[name]())
    head, _, rest = page.partition("\n")
    assert head == "<!doctype html>"
    root = ElementTree.fromstring(rest)
    assert [len(list(root.iter(tag))) for tag in ("script", "link", "a")] == [0, 0, 0]
    (image,) = root.iter("img")
    kind, _, data = str(image.get("src")).partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert "\n".join(lines(REPORTS[name]())) == root.findtext("body/pre")


def test_the_page_escapes_values() -> None:
    page = render(report(name='x<b>&"'))
    assert "x&lt;b&gt;&amp;" in page
    assert "A &lt;fast&gt; one" in page


# ---- comparing


def test_a_comparison_shows_the_change() -> None:
    lines, failures = compare(report(), report(scale=2.0))
    text = "\n".join(lines)
    # 8 ms become 14: 1 encoder, 3 · 4 steps, 1 rest.
    assert re.search(r"output_token_throughput +tokens/sec +375 +214 +-42.9 %$", text, re.MULTILINE)
    assert re.search(r"request_latency p50 +ms +8.00 +14.0 +\+75.0 %$", text, re.MULTILINE)
    assert "request_latency p99" not in text
    assert failures == []
    lines, _ = compare(report(), report())
    assert sum(line.endswith("within the spread") for line in lines) >= 8


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("output_token_throughput<-5%", True),
        ("output_token_throughput < -42.8 %", True),
        ("output_token_throughput<-43%", False),
        ("output_token_throughput>5%", False),
        ("request_latency>10%", True),
        ("request_latency.p95>80%", False),
        ("peak_memory>99%", True),
        ("load_time<+101%", True),
    ],
)
def test_conditions(text: str, fails: bool) -> None:
    _, failures = compare(report(), report(scale=2.0), [Condition.parse(text)])
    assert bool(failures) is fails


@pytest.mark.parametrize(
    "text", ["", "x", "throughput<5", "a<b%", "request_latency.p42>5%", "a=5%", "A<5%", "a<1e999%"]
)
def test_an_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Condition.parse(text)


@pytest.mark.parametrize("condition", ["speed<5%", "step_time.p99>5%"])
def test_a_condition_on_an_unknown_metric_is_refused(condition: str) -> None:
    with pytest.raises(BenchError):
        compare(report(), report(), [Condition.parse(condition)])


def test_reports_with_different_settings_are_not_compared() -> None:
    other = report(num_beams=4)
    other["bundle"]["sha256"] = "cd" * 32
    with pytest.raises(BenchError):
        compare(report(), other)
    with pytest.raises(BenchError):
        compare(report(), other, vary=["bundle"])
    lines, _ = compare(report(), other, vary=["bundle", "num_beams"])
    assert "num_beams: 1 → 4" in lines
    with pytest.raises(ConfigError):
        compare(report(), report(), vary=["colour"])
    with pytest.raises(BenchError):
        compare(report(**SWEEP), report(), vary=["scenario", "batch_size", "source_length"])


def test_a_comparison_reports_invalid_reports() -> None:
    lines, _ = compare(report(), report(windows=(1.0, 2.0)))
    assert lines[0].startswith("the second is INVALID: unstable")


def change(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.update(values)


@pytest.mark.parametrize(
    "damage",
    [
        change(bundle=None, settings=[]),
        change(cells=[]),
        change(cells=[5]),
        change(metrics={"a": 5}),
        change(metrics={"request_latency": {"unit": "ms", "p50": "fast"}}),
        change(validity=5),
        lambda data: data["cells"][0]["metrics"]["request_latency"].update(p50=[1]),
    ],
)
def test_a_damaged_report_is_refused(damage: Callable[[dict[str, Any]], object]) -> None:
    data = copy.deepcopy(report())
    damage(data)
    with pytest.raises(BenchError):
        compare(data, data, [Condition.parse("request_latency<5%")])


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"schema": "tfexport.bench/1"}', b" " * (16 * 1024 * 1024 + 1)],
)
def test_a_file_that_is_not_a_report_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(BenchError):
        read_result(tmp_path / "a.json")
    with pytest.raises(BenchError):
        read_result(tmp_path)
