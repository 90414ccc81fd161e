"""The result as a file: written after every cell, so that a run that ends early loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.contestants import Contestant
from comparison.process import BENCHMARKS
from comparison.settings import Setting
from tfexport.bench.machine import environment
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
            "environment": environment(),
            "revision": _revision(),
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
        loads: Mapping[Contestant, Mapping[str, Any]],
        failures: Mapping[Contestant, str],
    ) -> None:
        """Add a cell, what is new of loads and failures, and write the file.

        Args:
            cell: see `comparison.turns.measure`.
            loads: see `comparison.pool.Pool`.
            failures: why a contestant has no place in the cell.
        """
        model = cell["setting"]["model"]
        self.document["cells"].append(cell)
        for contestant, load in loads.items():
            self._keep("loads", {"model": model, **contestant.to_dict()}, load)
        for contestant, reason in failures.items():
            about = {"model": model, "is_quantised": cell["setting"]["is_quantised"], **contestant.to_dict()}
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


def _revision() -> str:
    """Return the commit of the source, with a plus sign when files differ from it; empty outside of a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(BENCHMARKS), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if changed else "")
