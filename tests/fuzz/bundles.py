"""Bundles with damaged files, and bundles of a stranger whose sums are right."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tfexport
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tfexport._io.names import MANIFEST
from tfexport._io.sealed_json import seal
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig

TEXTS = ["3 May 1999", "29 Ekim 1923"]


def prepare(model: Path, folder: Path) -> None:
    """Export a model directory."""
    export_bundle(str(model), folder / "bundle", ExportConfig(forms=("contrib",)), verify=False)


def said(bundle: Path) -> list[str]:
    """Load a bundle and generate."""
    with tfexport.load(bundle, threads=1) as model:
        return [result.text for result in model.generate(TEXTS, max_new_tokens=3)]


def _copied(folder: Path, scratch: Path) -> Path:
    bundle = scratch / "bundle"
    shutil.copytree(folder / "bundle", bundle)
    return bundle


def damaged(name: str) -> Callable[[Path, Path], Kind]:
    """Return the kind of bundles in which this file is damaged."""

    def make(folder: Path, scratch: Path) -> Kind:
        bundle = _copied(folder, scratch)
        original = (bundle / name).read_bytes()

        def use(raw: bytes) -> list[str]:
            (bundle / name).write_bytes(raw)
            return said(bundle)

        return Kind(mutated(original), use, said(bundle), is_summed=True)

    return make


def sealed(folder: Path, scratch: Path) -> Kind:
    """Return the kind of manifests that say something else, and whose own sum is right."""
    bundle = _copied(folder, scratch)
    original = json.loads((bundle / MANIFEST).read_bytes())
    del original["self_sha256"]

    def use(raw: bytes) -> list[str]:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):  # what cannot be sealed is as it is
            data = json.loads(raw)
            raw = seal({key: value for key, value in data.items() if key != "self_sha256"})
        (bundle / MANIFEST).write_bytes(raw)
        return said(bundle)

    return Kind(mutated_json(original), use, said(bundle))
