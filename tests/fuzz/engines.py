"""Engines of a bundle: their manifests, with sums that are wrong or right, and their plans."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated, mutated_json
from tests.tensorrt.artifact import stored
from tfexport._io.sealed_json import seal
from tfexport.tensorrt.artifact.store import engine_names, open_engine

_MANIFEST = "engine.json"


def prepare(folder: Path) -> None:
    """Make a bundle with an engine whose plans are a few bytes."""
    bundle = stored.make(folder / "with-engine")
    stored.store(bundle, stored.manifest(bundle))


def _opened(bundle: Path) -> list[Any]:
    (name,) = engine_names(bundle)
    engine = open_engine(bundle, name)
    return [engine.manifest, {plan: engine.read_plan(plan) for plan in engine.manifest.plans}]


def damaged(name: str) -> Callable[[Path, Path], Kind]:
    """Return the kind of engines in which this file is damaged."""

    def make(folder: Path, scratch: Path) -> Kind:
        bundle = scratch / "bundle"
        shutil.copytree(folder / "with-engine", bundle)
        (path,) = bundle.glob(f"engines/*/{name}")

        def use(raw: bytes) -> list[Any]:
            path.write_bytes(raw)
            return _opened(bundle)

        return Kind(mutated(path.read_bytes()), use, _opened(bundle), is_summed=True)

    return make


def sealed(folder: Path, scratch: Path) -> Kind:
    """Return the kind of manifests of engines that say something else, and whose own sum is right."""
    bundle = scratch / "bundle"
    shutil.copytree(folder / "with-engine", bundle)
    (path,) = bundle.glob(f"engines/*/{_MANIFEST}")
    original = json.loads(path.read_bytes())
    del original["self_sha256"]

    def use(raw: bytes) -> list[Any]:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):  # what cannot be sealed is as it is
            raw = seal({key: value for key, value in json.loads(raw).items() if key != "self_sha256"})
        path.write_bytes(raw)
        return _opened(bundle)

    return Kind(mutated_json(original), use, _opened(bundle))
