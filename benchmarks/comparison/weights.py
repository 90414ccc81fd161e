"""Weights in every system's own form, made once from one model directory.

As a program it writes that directory: python -m comparison.weights MODEL FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from comparison.processes import BENCHMARKS, environment, start
from comparison.systems import DATES, OURS, SYSTEMS, Variant
from tfexport.errors import BenchError

ONNX = "from tfexport.cli import main; main()"


class ConvertedWeights:
    """A folder with one subfolder for each model, and in it one for each form of its weights.

    What is there already is used as it is.
    """

    def __init__(self, folder: Path, pythons: Mapping[str, Path], writer: str = "comparison.weights") -> None:
        """Keep where to work, the Python of each environment, and the program that writes a model directory."""
        self.folder, self.pythons, self.writer = folder, pythons, writer
        self._failures: dict[Path, BenchError] = {}

    def python(self, variant: Variant) -> Path:
        """Return the Python of a variant's environment."""
        return self.pythons[SYSTEMS[variant.system].environment]

    def vocab(self, model: str) -> int:
        """Return the number of source tokens of a model.

        Raises:
            BenchError: its weights could not be written.
        """
        config = json.loads((self.weights(model) / "config.json").read_text(encoding="utf-8"))
        return int(config["source_vocab"])

    def weights(self, model: str) -> Path:
        """Return the model directory that everything is made from.

        Raises:
            BenchError: it could not be written.
        """
        folder = self.folder / model / "weights"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run(f"weights of {model}", [self.pythons[OURS], "-P", "-m", self.writer, model, folder])
        return folder

    def prepared(self, model: str, variant: Variant) -> Path:
        """Return the folder that a variant loads.

        Raises:
            BenchError: it could not be made; asked again, the same.
        """
        target = self.folder / model / variant.files
        if target in self._failures:
            raise self._failures[target]
        if not target.exists():
            try:
                (self._export if SYSTEMS[variant.system].is_ours else self._convert)(model, variant, target)
            except BenchError as error:
                self._failures[target] = error
                raise
        return target

    def _export(self, model: str, variant: Variant, target: Path) -> None:
        """Make a bundle as a user does; outputs are compared later, so it is not verified here."""
        options = ["--precision", variant.precision, "--no-verify"]
        if variant.optimize_for:
            options += ["--optimize-for", variant.optimize_for]
        command: list[str | Path] = [self.python(variant), "-P", "-c", ONNX, "onnx", self.weights(model)]
        command += ["--output", target, *options]
        _run(f"{variant}: tfexport onnx", command)

    def _convert(self, model: str, variant: Variant, target: Path) -> None:
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with start(str(variant), variant.system, self.python(variant)) as worker:
            weights = str(self.weights(model).resolve())
            worker.ask("convert", weights=weights, target=str(partial.resolve()), precision=variant.precision)
        os.replace(partial, target)


def _run(subject: str, command: list[str | Path]) -> None:
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment(), check=False)
    except OSError as error:
        raise BenchError(f"{subject}: no Python at {command[0]} ({error.strerror}); give --python") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise BenchError(f"{subject}: {lines[-1] if lines else f'exit code {done.returncode}'}")


if __name__ == "__main__":
    from tfexport.models.directory import load_model, save_model
    from tfexport.models.presets import build_preset

    name, folder = sys.argv[1:]
    save_model(load_model(BENCHMARKS.parent / "models" / name) if name == DATES else build_preset(name), folder)
