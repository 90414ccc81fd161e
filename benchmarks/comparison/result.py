"""The result as a file, written after every cell, and what its times say: ratios and their geometric means."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.processes import BENCHMARKS
from comparison.systems import OURS, PRECISIONS, Setting, Variant
from tfexport.bench.machine import environment
from tfexport.bench.timing import geometric_mean, ratio
from tfexport.cores import available_cores
from tfexport.errors import BenchError

SCHEMA = "tfexport.side_by_side/1"
# What must be the same for cells to stand in one file.
_SAME = ("cpu", "cores", "threads", "system", "python", "versions")


class Result:
    """A result and the file that it is in.

    Attributes:
        document: JSON values: `schema`, `environment`, `revision` of the source, `options`, `cells`, `loads` and
            `not_measured`.
    """

    def __init__(self, path: Path, options: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a result, or go on with the one in the file.

        Args:
            path: of the file.
            options: of the run.
            resume: go on with the file; it begins anew where there is none.

        Raises:
            BenchError: the file is there and may not be gone on with, or another one.
        """
        self.path = path
        begun = {
            "schema": SCHEMA,
            "environment": environment(available_cores()),
            "revision": revision(),
            "options": dict(options),
            "cells": [],
            "loads": [],
            "not_measured": [],
        }
        self.document: dict[str, Any] = begun
        if path.exists():
            if not resume:
                raise BenchError(f"{path}: is there already; go on with it by --resume, or choose another --output")
            self.document = read(path)
            _check_same(path, self.document, begun)

    def has(self, setting: Setting) -> bool:
        """Say whether a setting was measured."""
        return any(cell["setting"] == setting.to_dict() for cell in self.document["cells"])

    def add(
        self,
        cell: Mapping[str, Any],
        loads: Mapping[Variant, Mapping[str, Any]],
        failures: Mapping[Variant, str],
    ) -> None:
        """Add a cell, what is new of loads and failures, and write the file.

        Args:
            cell: see `comparison.rounds.measure`.
            loads: see `comparison.processes.WorkerPool`.
            failures: why a variant has no place in the cell.
        """
        model = cell["setting"]["model"]
        self.document["cells"].append(cell)
        for variant, load in loads.items():
            self._keep("loads", {"model": model, **variant.to_dict()}, load)
        for variant, reason in failures.items():
            about = {"model": model, "is_quantised": cell["setting"]["is_quantised"], **variant.to_dict()}
            self._keep("not_measured", about, {"reason": reason})
        self.write()

    def write(self) -> None:
        """Write the file whole, in place of the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def _keep(self, table: str, about: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Add a row, in place of the one that is about the same."""
        rows = [row for row in self.document[table] if {key: row.get(key) for key in about} != about]
        self.document[table] = [*rows, {**about, **values}]


def read(path: Path) -> dict[str, Any]:
    """Read a result.

    Raises:
        BenchError: the file is missing, or none of these.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; expected a result of benchmarks/side_by_side.py") from error
    except ValueError as error:
        raise BenchError(f"{path}: is not JSON ({error}); expected a result of benchmarks/side_by_side.py") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BenchError(f"{path}: is no result of benchmarks/side_by_side.py, expected schema {SCHEMA}")
    return document


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    problems = [
        f"{name} was {before['environment'][name]} and is {now['environment'][name]}"
        for name in _SAME
        if before["environment"][name] != now["environment"][name]
    ]
    problems += [
        f"{name} was {before[name]} and is {now[name]}" for name in ("options", "revision") if before[name] != now[name]
    ]
    if problems:
        raise BenchError(f"{path}: cannot be resumed: {'; '.join(problems)}; choose another --output")


def revision() -> str:
    """Return the commit of the source, with a plus sign when files differ from it; empty outside of a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(BENCHMARKS), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare ours in each precision with each peer, at the peer's fastest number of threads.

    Args:
        runs: of one setting, each with `system`, `precision`, `threads`, `median_s` and `seconds`, one list of calls
            for each turn.

    Returns:
        For each pair `ratio`, the median over rounds of the peer's time over ours in the same round, above 1 where
        ours is faster; `low` and `high` of the rounds; who was compared. A peer without rounds is left out.
    """
    found = []
    for ours in (run for run in runs if run["system"] == OURS):
        for peer in fastest(run for run in runs if run["system"] != OURS and run["seconds"]):
            over_rounds = ratio(peer["seconds"], ours["seconds"])
            found.append(
                {
                    "precision": ours["precision"],
                    "peer": peer["system"],
                    "peer_precision": peer["precision"],
                    "peer_threads": peer["threads"],
                    "ratio": over_rounds.median,
                    "low": over_rounds.low,
                    "high": over_rounds.high,
                }
            )
    return found


def fastest(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep of each system and precision the number of threads with the lowest median."""
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for run in runs:
        key = run["system"], run["precision"]
        if key not in best or run["median_s"] < best[key]["median_s"]:
            best[key] = run
    return list(best.values())


def pairs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every ratio of a result as one flat record: its setting, the ratio, and the runs `ours` and `theirs`.

    They are in the order of tables: models as measured, then precisions, decoding and sizes.
    """
    found = []
    for cell in result["cells"]:
        runs = {(run["system"], run["precision"], run["threads"]): run for run in cell["runs"]}
        for compared in cell["ratios"]:
            ours = runs[OURS, compared["precision"], None]
            peer = runs[compared["peer"], compared["peer_precision"], compared["peer_threads"]]
            found.append({**cell["setting"], **compared, "ours": ours, "theirs": peer})
    models = list(dict.fromkeys(pair["model"] for pair in found))
    return sorted(
        found,
        key=lambda pair: (
            models.index(pair["model"]),
            PRECISIONS.index(pair["precision"]),
            *(pair[name] for name in ("num_beams", "source_length", "batch_size")),
        ),
    )


def means(result: Mapping[str, Any], peer: str) -> dict[str, tuple[float, int]]:
    """Return geometric means over a peer, with how many cells each has: by precision and decoding, and overall."""
    groups: dict[str, list[float]] = {}
    for pair in pairs(result):
        if pair["peer"] == peer:
            decoding = "greedy" if pair["num_beams"] == 1 else f"beam {pair['num_beams']}"
            same = pair["precision"] == pair["peer_precision"]
            names = [f"{pair['precision']} {decoding}", *([decoding, "all"] if same else [])]
            if pair["precision"] == "int4" and pair["batch_size"] == 1:
                names.append("int4 at batch 1")
            for name in names:
                groups.setdefault(name, []).append(pair["ratio"])
    return {name: (geometric_mean(values), len(values)) for name, values in groups.items()}
