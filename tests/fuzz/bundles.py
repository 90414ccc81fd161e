"""Bundles and engines with damaged files, and those of a stranger whose hashes are right."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tfexport
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tests.tensorrt.artifact import stored
from tfexport._io.strict_json import seal
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.tensorrt.store import engine_names, open_engine

TEXTS = ["3 May 1999", "29 Ekim 1923"]
Read = Callable[[Path], Any]
Make = Callable[[Path, Path], Kind]


def prepare(model: Path, folder: Path) -> None:
    """Export a model directory; and make a bundle with an engine whose plans are a few bytes."""
    export_bundle(str(model), folder / "bundle", ExportConfig(forms=("contrib",)), verify=False)
    bundle = stored.make(folder / "with-engine")
    stored.store(bundle, stored.manifest(bundle))


def said(bundle: Path) -> list[str]:
    """Load a bundle and generate."""
    with tfexport.load(bundle, threads=1) as model:
        return [result.text for result in model.generate(TEXTS, max_new_tokens=3)]


def engines_of(bundle: Path) -> list[Any]:
    """Read the only engine of a bundle."""
    (name,) = engine_names(bundle)
    engine = open_engine(bundle, name)
    return [engine.manifest, {plan: engine.read_plan(plan) for plan in engine.manifest.plans}]


def damaged(pattern: str, source: str = "bundle", read: Read = said) -> Make:
    """Return the kind of bundles in which the file of this pattern is damaged."""

    def make(folder: Path, scratch: Path) -> Kind:
        bundle = Path(shutil.copytree(folder / source, scratch / "bundle"))
        (path,) = bundle.glob(pattern)

        def use(raw: bytes) -> Any:
            path.write_bytes(raw)
            return read(bundle)

        return Kind(mutated(path.read_bytes()), use, read(bundle), is_summed=True)

    return make


def sealed(pattern: str, source: str = "bundle", read: Read = said) -> Make:
    """Return the kind of manifests that state something else, and whose own hash is right."""

    def make(folder: Path, scratch: Path) -> Kind:
        bundle = Path(shutil.copytree(folder / source, scratch / "bundle"))
        (path,) = bundle.glob(pattern)
        original = json.loads(path.read_bytes())
        del original["self_sha256"]

        def use(raw: bytes) -> Any:
            with contextlib.suppress(ValueError, AttributeError, RecursionError):  # what cannot be sealed is as it is
                raw = seal({key: value for key, value in json.loads(raw).items() if key != "self_sha256"})
            path.write_bytes(raw)
            return read(bundle)

        return Kind(mutated_json(original), use, read(bundle))

    return make
