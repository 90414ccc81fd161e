"""What a soak has shown: JSON, and a page with a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from soaking.run import Record, Soak
from soaking.watched import Sample, mb_an_hour
from tfexport.bench.machine import environment
from tfexport.bench.plot import HEIGHT, WIDTH, Series, lines

SCHEMA = "tfexport.soak/1"
# Resident memory may rise by so much, where enough time has passed to tell it from the noise.
MOST_MB_AN_HOUR, JUDGED_FROM_S = 1.0, 1800.0
# That are compared where a beginning and an end are.
_ENDS = 60
_POINTS = 300
_STYLE = """
svg { --page: #fff; --ink: #1a1d21; --soft: #5c6570; --line: #dde1e6; --c0: #2f6fd6; --c1: #e08a1e;
  font: 12px system-ui, sans-serif; background: var(--page); }
@media (prefers-color-scheme: dark) { svg { --page: #14171b; --ink: #e8eaed; --soft: #9aa4b0; --line: #343a42;
  --c0: #6ea3f5; --c1: #f0ab55; } }
.grid, .axis { stroke: var(--line); } .tick, .name { fill: var(--soft); } .label { fill: var(--ink); }
.line { fill: none; stroke-width: 1.5; } .s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); }
"""


def document(soak: Soak, bundle_sha256: str, *, is_over: bool) -> dict[str, Any]:
    """Return all that is known of a soak as JSON values.

    Args:
        soak: that runs or is over.
        bundle_sha256: of the bundle's manifest.
        is_over: whether it has come to its end.
    """
    targets = [_target(record, soak.plan.warm_up_s) for record in soak.records]
    return {
        "schema": SCHEMA,
        "is_over": is_over,
        "problems": [problem for one in targets for problem in one["problems"]],
        "bundle_sha256": bundle_sha256,
        "environment": environment(1),
        "plan": asdict(soak.plan),
        "targets": targets,
    }


def _target(record: Record, warm_up_s: float) -> dict[str, Any]:
    warm = [one for one in record.samples if one.at_s >= warm_up_s]
    loaded_s = warm[-1].at_s - warm[0].at_s if warm else 0.0
    slope, anonymous = (
        mb_an_hour(warm, name) if len(warm) > 2 and loaded_s else None for name in ("rss_mb", "anonymous_mb")
    )
    return {
        "name": record.name,
        "problems": [*_problems(record, slope, loaded_s), *record.problems],
        "num_problems": record.num_problems,
        "counts": dict(sorted(record.counts.items())),
        "num_reloads": record.num_reloads,
        "loaded_s": loaded_s,
        "mb_an_hour": slope,
        "anonymous_mb_an_hour": anonymous,
        "rss_mb": [median(one.rss_mb for one in part) for part in (warm[:_ENDS], warm[-_ENDS:])] if warm else None,
        "before": record.before and asdict(record.before),
        "after": record.after and asdict(record.after),
        "exit_code": record.exit_code,
        "samples": {
            name: [round(getattr(one, name), 2) for one in record.samples] for name in Sample.__dataclass_fields__
        },
    }


def _problems(record: Record, slope: float | None, loaded_s: float) -> list[str]:
    """Say what the process has kept."""
    problems = []
    if slope is not None and loaded_s >= JUDGED_FROM_S and slope > MOST_MB_AN_HOUR:
        problems.append(f"{record.name}: memory rises by {slope:.2f} MB an hour, expected {MOST_MB_AN_HOUR:g} at most")
    if record.before and record.after:
        for name in ("threads", "descriptors", "temporary_files"):
            before, after = getattr(record.before, name), getattr(record.after, name)
            if after > before:
                problems.append(f"{record.name}: {after} {name.replace('_', ' ')} at the end, {before} before")
    if record.exit_code not in (None, 0):
        problems.append(f"{record.name}: exit code {record.exit_code}")
    if record.num_problems:
        problems.append(f"{record.name}: {record.num_problems} of {record.counts.total()} were not as expected")
    return problems


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write NAME.json, NAME.md and NAME.svg, each whole.

    Args:
        path: NAME.json.
        found: of `document`.
    """
    texts = {".json": json.dumps(found) + "\n", ".md": _page(found, path.with_suffix(".svg").name) + "\n"}
    for suffix, text in {**texts, ".svg": _picture(found["targets"])}.items():
        new = path.with_suffix(f"{suffix}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(path.with_suffix(suffix))


def _page(found: Mapping[str, Any], picture: str) -> str:
    plan, targets, machine = found["plan"], found["targets"], found["environment"]
    minutes = min((one["loaded_s"] for one in targets), default=0) / 60
    state = "not over yet" if not found["is_over"] else "failed" if found["problems"] else "passed"
    said = (
        f"{plan['rate']:g} asks a second of each in bursts, the bundle loaded again every "
        f"{plan['reload_every_s']:g} s; {machine['cpu']}, {machine['date']}."
    )
    header = f"| | {' | '.join(one['name'] for one in targets)} |"
    rows = [f"| {name} | {' | '.join(_cell(one) for one in targets)} |" for name, _cell in _ROWS.items()]
    ways = sorted({way for one in targets for way in one["counts"]})
    rows += [f"| {way} | {' | '.join(str(one['counts'].get(way, 0)) for one in targets)} |" for way in ways]
    return "\n".join(
        [
            f"# Soak: {minutes:.0f} minutes after {plan['warm_up_s'] / 60:.0f} of warm-up, {state}",
            "",
            *(f"- {problem}" for problem in found["problems"]),
            *([""] if found["problems"] else []),
            said,
            "",
            header,
            "|---" * (1 + len(targets)) + "|",
            *rows,
            "",
            f"![Resident memory over time]({picture})",
        ]
    )


def _rss(one: Mapping[str, Any]) -> str:
    return " → ".join(f"{value:.1f}" for value in one["rss_mb"]) if one["rss_mb"] else "–"


def _slopes(one: Mapping[str, Any]) -> str:
    slopes = (one["mb_an_hour"], one["anonymous_mb_an_hour"])
    return " / ".join("–" if slope is None else f"{slope:+.2f}" for slope in slopes)


def _asked(one: Mapping[str, Any]) -> str:
    return f"{sum(one['counts'].values()):,}"


def _wrong(one: Mapping[str, Any]) -> str:
    return str(one["num_problems"])


def _reloads(one: Mapping[str, Any]) -> str:
    return str(one["num_reloads"])


def _kept(one: Mapping[str, Any]) -> str:
    ends = [one["before"], one["after"]]
    names = ("threads", "descriptors", "temporary_files")
    return " → ".join("/".join(str(end[name]) for name in names) if end else "–" for end in ends)


_ROWS = {
    "asked": _asked,
    "not as expected": _wrong,
    "bundle loaded again": _reloads,
    "memory under load, first → last 5 minutes, MB": _rss,
    "slope of memory / of what is no file's, MB an hour": _slopes,
    "threads/descriptors/temporary files at rest, warm → end": _kept,
}


def _picture(targets: Sequence[Mapping[str, Any]]) -> str:
    series = []
    for one in targets:
        xs, ys = one["samples"]["at_s"], one["samples"]["rss_mb"]
        step = 1 + len(xs) // _POINTS
        series.append(Series(one["name"], [x / 60 for x in xs[::step]], ys[::step]))
    drawn = lines([one for one in series if one.xs], "Resident memory", "minutes", "MB")
    legend = "".join(
        f'<rect class="c{index}" x="{200 + 130 * index}" y="3" width="9" height="9"/>'
        f'<text class="label" x="{214 + 130 * index}" y="12">{escape(one.label)}</text>'
        for index, one in enumerate(series)
    )
    attributes = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
    body = drawn.removeprefix("<svg ").removesuffix("</svg>")
    head, _, content = body.partition(">")
    return f"{attributes}{head}><style>{_STYLE}</style>{content}{legend}</svg>\n"
