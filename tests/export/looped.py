"""Bundles with a loop graph, made of bundles without one: nothing is traced again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tfexport._io.names import GENERATION
from tfexport._io.sealed_json import render
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.contract import LOOP
from tfexport.export.loop.settings import loop_settings
from tfexport.export.loop.write import write_loop
from tfexport.generation import GenerationDefaults


def add_loop(bundle: Path, path: Path, defaults: GenerationDefaults | None = None) -> None:
    """Write a bundle anew with a loop graph, and with defaults of generation where they are given."""
    manifest = open_bundle(bundle).manifest
    with create_bundle(path) as builder:
        shutil.copytree(bundle, builder.path, dirs_exist_ok=True)
        if defaults is not None:
            (builder.path / GENERATION).write_bytes(render(defaults.given()))
        settings = loop_settings(manifest.spec, defaults or GenerationDefaults(), manifest.text.target_prefix)
        loop = write_loop(builder.path, manifest.graphs, manifest.spec, settings)
        builder.finish(
            spec=manifest.spec,
            config=manifest.config,
            graphs={**manifest.graphs, LOOP: loop},
            versions=manifest.versions,
            quantization=manifest.quantization,
            text=manifest.text,
            loop=settings,
        )
