"""The result as a file, written after every cell, so that a run that was ended goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.result import revision

from stepwise.cells import Cell, Device
from tfexport.bench.machine import environment
from tfexport.cores import available_cores
from tfexport.errors import BenchError
from tfexport.probes import find_gpus

SCHEMA = "tfexport.gpu/1"


class Result:
    """A result and the file that it is in.

    Attributes:
        document: JSON values: `schema`, `environment`, `gpu`, `revision` of the source, `options` and `cells`.
    """

    def __init__(self, path: Path, options: Mapping[str, Any], device: Device, *, resume: bool) -> None:
        """Begin a result, or go on with the one in the file.

        Args:
            path: of the file.
            options: of the run, which must be the same when it goes on.
            device: that is measured.
            resume: go on with the file; it begins anew where there is none.

        Raises:
            BenchError: the file is there and may not be gone on with, or is another one.
        """
        self.path = path
        here = environment(available_cores())
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "environment": here,
            "gpu": _gpu() if device == "cuda" else None,
            "revision": revision(),
            "options": {**options, "device": device},
            "cells": [],
        }
        if path.exists():
            if not resume:
                raise BenchError(f"{path}: is there already; go on with it by --resume, or choose another --output")
            self._go_on()

    def has(self, cell: Cell) -> bool:
        """Say whether a cell was measured."""
        return any(measured["cell"] == cell.to_dict() for measured in self.document["cells"])

    def add(self, measured: Mapping[str, Any]) -> None:
        """Add a cell and write the file whole, in place of the one before."""
        self.document["cells"].append(measured)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def _go_on(self) -> None:
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BenchError(f"{self.path}: is not JSON ({error}); choose another --output") from error
        if not isinstance(before, dict) or before.get("schema") != SCHEMA:
            raise BenchError(f"{self.path}: is no result of benchmarks/gpu.py, expected schema {SCHEMA}")
        now = self.document
        problems = [
            f"{name} was {before[name]} and is {now[name]}"
            for name in ("gpu", "revision", "options")
            if before[name] != now[name]
        ]
        problems += [
            f"{name} was {before['environment'][name]} and is {now['environment'][name]}"
            for name in ("cpu", "versions")
            if before["environment"][name] != now["environment"][name]
        ]
        if problems:
            raise BenchError(f"{self.path}: cannot be resumed: {'; '.join(problems)}; choose another --output")
        self.document = before


def _gpu() -> dict[str, Any] | None:
    """Return what the first GPU says of itself, None where no driver answers."""
    found, _ = find_gpus()
    return found[0] if found else None
