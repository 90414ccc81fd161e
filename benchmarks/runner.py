"""What the benchmarks share: worker processes, weights for each system, result files, tables."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from timing import Effort

from tfexport.bench.machine import environment
from tfexport.errors import BenchError
from tfexport.runtime.cpu import available_cores

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
# This tfexport, another one, and CTranslate2.
OURS, REVISION, CTRANSLATE2 = "tfexport", "revision", "ctranslate2"
CTRANSLATE2_PYTHON = ROOT / "build" / "peers" / CTRANSLATE2 / "bin" / "python"
DATES = "dates"
# Before each turn: until the threads of the system before have fallen asleep (those of OpenMP spin for up to 0.2 s).
PAUSE_S = 0.25
# Short calls are repeated; a call of half a second needs no repetition.
TURN = Effort(warm_up=1, least_runs=3, least_s=0.2, long_s=0.5)
_EXPORT = "from tfexport.cli import main; main()"


class Several(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Read values of one type with commas between them; duplicates count once."""

    name = "value,…"

    def __init__(self, of: click.ParamType[Any]) -> None:
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Split and convert."""
        words = value.split(",") if isinstance(value, str) else value
        return list(dict.fromkeys(self.of.convert(word, param, ctx) for word in words))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the choices, or `N,…`."""
        return ",".join(self.of.choices) if isinstance(self.of, click.Choice) else "N,…"


NUMBERS = Several(click.IntRange(min=1))


class Worker:
    """A process that answers requests, lines of JSON; see `workers.answer_requests`."""

    def __init__(self, name: str, python: Path, *arguments: str, limit_s: float = 3600.0) -> None:
        """Start the process.

        Args:
            name: for messages.
            python: of its environment.
            arguments: of that Python: a module and its arguments.
            limit_s: seconds that a request may take.
        """
        self.name, self._limit_s = name, limit_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [str(python), "-P", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=worker_environment(),
            )
        except OSError as error:
            self._stderr.close()
            raise BenchError(
                f"{name}: no Python at {python} ({error.strerror}); see benchmarks/requirements.txt or give --python"
            ) from error

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            line = self._exchange(json.dumps({"op": op, **values}).encode() + b"\n")
        finally:
            timer.cancel()
        if is_late.is_set():
            raise BenchError(f"{self.name}: {op} took longer than {self._limit_s:g} s")
        if not line.endswith(b"\n"):
            raise BenchError(f"{self.name}: {self._death(op)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {op} failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, request: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has died: reading returns nothing
        return self._process.stdout.readline()

    def _death(self, op: str) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how} during {op}" + (f" ({lines[-1]})" if lines else "")


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker, which imports from this folder."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Weights:
    """A folder with the weights of each model in the format of each system; existing files are used as they are."""

    def __init__(self, folder: Path, pythons: Mapping[str, Path]) -> None:
        self.folder, self.pythons = folder, {OURS: Path(sys.executable), **pythons}
        self._failures: dict[Path, BenchError] = {}

    def vocab(self, model: str) -> int:
        """Return the size of the source vocabulary of a model."""
        config = json.loads((self.source(model) / "config.json").read_text(encoding="utf-8"))
        return int(config["source_vocab"])

    def source(self, model: str) -> Path:
        """Return the model directory from which everything is made; write it the first time."""
        folder = self.folder / model / "weights"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run(f"weights of {model}", [self.pythons[OURS], "-P", "-m", "lengths", model, folder])
        return folder

    def prepared(self, model: str, system: str, precision: str, optimize_for: str | None = None) -> Path:
        """Return the folder that a system loads; make it the first time."""
        name = {OURS: "bundle"}.get(system, system)
        target = self.folder / model / "-".join(filter(None, (name, precision, optimize_for)))
        if target in self._failures:
            raise self._failures[target]
        try:
            if not target.exists() and system == CTRANSLATE2:
                self._convert(model, precision, target)
            elif not target.exists():
                self._export(model, system, precision, optimize_for, target)
        except BenchError as error:
            self._failures[target] = error
            raise
        return target

    def _export(self, model: str, system: str, precision: str, optimize_for: str | None, target: Path) -> None:
        # Not verified: the benchmarks compare outputs.
        command = [self.pythons[system], "-P", "-c", _EXPORT, "onnx", self.source(model), "--output", target]
        command += [
            "--precision",
            precision,
            "--no-verify",
            *(["--optimize-for", optimize_for] if optimize_for else []),
        ]
        _run(f"{system} {precision}: tfexport onnx", command)

    def _convert(self, model: str, precision: str, target: Path) -> None:
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with Worker(f"{CTRANSLATE2} {precision}", self.pythons[CTRANSLATE2], "-m", "workers", CTRANSLATE2) as worker:
            source = str(self.source(model).resolve())
            worker.ask("convert", weights=source, target=str(partial.resolve()), precision=precision)
        partial.replace(target)


def _run(subject: str, command: Sequence[str | Path]) -> None:
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=worker_environment())
    except OSError as error:
        raise BenchError(f"{subject}: no Python at {command[0]} ({error.strerror}); give --python") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise BenchError(f"{subject}: {lines[-1] if lines else f'exit code {done.returncode}'}")


class ResultFile:
    """A result that is written after every cell, so that an interrupted run can be resumed.

    Attributes:
        document: JSON values: `schema`, `environment`, `revision`, `options`, `cells` and further lists.
    """

    def __init__(self, path: Path, schema: str, options: Mapping[str, Any], *, resume: bool, **lists: Any) -> None:
        """Begin a result, or resume the one in the file."""
        self.path = path
        now = environment(available_cores())
        self.document: dict[str, Any] = {
            "schema": schema,
            "environment": now,
            "revision": revision(),
            "options": dict(options),
            **lists,
            "cells": [],
        }
        if not path.exists():
            return
        if not resume:
            raise BenchError(f"{path}: exists; resume it with --resume, or choose another --output")
        before = read_result(path, schema)
        same = {**self.document, **{name: now[name] for name in ("cpu", "cores", "threads", "versions")}}
        problems = [
            f"{name} was {found} and is {same[name]}"
            for name, found in {**before, **before["environment"]}.items()
            if name in ("cpu", "cores", "threads", "versions", "options", "revision", "gpu") and found != same[name]
        ]
        if problems:
            raise BenchError(f"{path}: cannot be resumed: {'; '.join(problems)}; choose another --output")
        self.document = before

    def has(self, name: str, values: Mapping[str, Any]) -> bool:
        """Return whether a cell with these values under this name is in the result."""
        return any(cell[name] == values for cell in self.document["cells"])

    def write(self) -> None:
        """Write the file as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def read_result(path: Path, schema: str) -> dict[str, Any]:
    """Read a result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; expected a result with schema {schema}") from error
    except ValueError as error:
        raise BenchError(f"{path}: is not JSON ({error}); expected a result with schema {schema}") from error
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise BenchError(f"{path}: is not a result with schema {schema}; give another file")
    return document


def revision() -> str:
    """Return the commit of the source, with a plus sign if files were changed; empty outside of a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(BENCHMARKS), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def agreement(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the shares of equal sequences, and of tokens before the first difference."""
    prefixes = [
        next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(wanted))
        for found, wanted in zip(outputs, expected, strict=True)
    ]
    return {
        "equal": statistics.fmean(found == wanted for found, wanted in zip(outputs, expected, strict=True)),
        "equal_prefix": sum(prefixes) / sum(map(len, expected)),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
