"""Replacing a bundle deletes only files that its manifest or those of its engines list."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.bundle.made import CONTENT, cannot_create, fill, make, siblings
from tests.command import ran
from tests.tensorrt.artifact import stored
from tfexport._io import atomic
from tfexport._io.strict_json import seal
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.contents import EngineFiles
from tfexport.errors import BundleError, EngineError
from tfexport.tensorrt.store import add_engine, choose_engine, open_engine

NAME = "tensorrt-rtx-static-fp32"
NEW = CONTENT | {"weights.safetensors": b"new"}


@pytest.fixture
def engine(bundle: Path) -> Path:
    """An engine of the bundle, with kernels."""
    opened = open_bundle(bundle)
    folder = stored.store(opened, stored.manifest(opened))
    (folder / "kernels" / "1.7-NVIDIA-L4").mkdir(parents=True)
    for name in ("kernels.json", "encoder.kernels"):
        (folder / "kernels" / "1.7-NVIDIA-L4" / name).write_text("kept")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(bundle: Path, message: str) -> None:
    """Expect an error before anything is written."""
    before = contents(bundle.parent)
    cannot_create(bundle, message, force=True)
    assert contents(bundle.parent) == before


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "deep/notes.txt",
        "engines/notes.txt",
        f"engines/{NAME}/mine.plan",
        f"engines/{NAME}/kernels/1.7-NVIDIA-L4/mine.kernels",
    ],
)
def test_a_file_that_no_manifest_lists_is_never_deleted(name: str, bundle: Path, engine: Path) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("mine")
    refuses(bundle, f"holds more than a bundle: {name!r} does not belong to it; --force deletes only files")
    assert (bundle / name).read_text() == "mine"


@pytest.mark.parametrize(
    "plans", [{"encoder": {"file": "../../../thesis.tex"}}, {"../x": {"file": "x"}}, {"encoder": {"file": "."}}, []]
)
def test_an_engine_lists_only_files_of_its_folder(bundle: Path, engine: Path, plans: object) -> None:
    data = {"format_version": 1, "plans": plans, "sources": {}}
    (engine / "engine.json").write_bytes(seal(data))
    refuses(bundle, f"'engines/{NAME}/engine.json' does not belong to it")


@pytest.mark.parametrize("place", ["engines", f"engines/{NAME}", f"engines/{NAME}/kernels"])
def test_links_are_not_followed(place: str, bundle: Path, engine: Path) -> None:
    outside = (bundle / place).rename(bundle.parent / "outside")
    (outside / ".x.tmp-0123456789abcdef").write_text("mine")
    (bundle / place).symlink_to(outside)
    refuses(bundle, f"{place!r} is a symbolic link, expected a plain file")
    assert (outside / ".x.tmp-0123456789abcdef").read_text() == "mine"


def test_a_file_created_while_the_bundle_is_written_is_never_deleted(bundle: Path, engine: Path) -> None:
    before = open_bundle(bundle)
    error = pytest.raises(BundleError, match=r"holds more than a bundle: 'notes\.txt' does not belong to it")
    with error, create_bundle(bundle, force=True) as builder:
        fill(builder, NEW)
        (bundle / "notes.txt").write_text("mine")
    assert (bundle / "notes.txt").read_text() == "mine"
    (bundle / "notes.txt").unlink()
    assert open_bundle(bundle) == before
    open_engine(bundle, NAME).check_plans()
    assert siblings(bundle) == []


def test_an_output_created_while_the_bundle_is_written_is_not_replaced(tmp_path: Path) -> None:
    error = pytest.raises(BundleError, match=r"exists; choose another name, or replace it with --force")
    with error, create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "thesis.tex").write_text("years of work")
    assert (tmp_path / "bundle" / "thesis.tex").read_text() == "years of work"
    assert siblings(tmp_path / "bundle") == []


# ---- engines


def test_engines_stay_and_are_stale_if_their_sources_changed(bundle: Path, engine: Path) -> None:
    before = contents(engine)
    for content, stale in ((CONTENT | {"parity.json": b'{"other": 1}'}, ()), (NEW, (NAME,))):
        with create_bundle(bundle, force=True) as builder:
            fill(builder, content)
        assert contents(engine) == before
        assert builder.stale_engines == stale
    assert siblings(bundle) == []
    opened = open_bundle(bundle)
    with pytest.raises(EngineError, match=r"weights\.safetensors: built with .*; build it again with: tfexport trt"):
        choose_engine(opened, NAME, stored.MACHINE)
    assert json.loads(ran("inspect", bundle, "--json").stdout)["engines"][NAME]["stale"] is True
    assert "  stale, cannot be used here: weights.safetensors: built with" in ran("inspect", bundle).stdout


def test_a_bundle_is_not_replaced_while_an_engine_is_built(bundle: Path, engine: Path) -> None:
    opened = open_bundle(bundle)
    with add_engine(opened.path, "other", force=False) as folder:
        for name, data in contents(engine).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        cannot_create(bundle, "engines/other is being written by another process; wait", force=True)
    make(bundle, NEW, force=True)
    open_engine(bundle, "other")


def test_an_engine_built_while_the_bundle_is_written_is_not_lost(
    bundle: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = atomic.publish

    def build(*arguments: object) -> None:
        """Build an engine after the others were copied."""
        shutil.copytree(engine, bundle / "engines" / "other")
        publish(*arguments)

    before = open_bundle(bundle)
    error = pytest.raises(BundleError, match=r"the engines of .* changed while the bundle was written; run it again")
    with error, create_bundle(bundle, force=True) as builder:
        fill(builder, NEW)
        monkeypatch.setattr(atomic, "publish", build)
    assert open_bundle(bundle) == before
    open_engine(bundle, "other")
    assert siblings(bundle) == []


def test_temporary_files_of_a_killed_build_are_removed(bundle: Path, engine: Path) -> None:
    for folder in (bundle / "engines", engine / "kernels"):
        (folder / ".new.lock").touch()
        (folder / ".new.tmp-0123456789abcdef").mkdir()
        (folder / ".new.tmp-0123456789abcdef" / "encoder.plan").write_bytes(b"half")
    engine.rename(engine.with_name(f".{NAME}.old-0123456789abcdef"))
    make(bundle, NEW, force=True)
    open_engine(bundle, NAME).check_plans()
    assert not [path for path in bundle.rglob("*") if path.name.startswith(".")]


# ---- names


@pytest.mark.parametrize("name", ["x" * 250, "ä" * 120, "x" * 255])
def test_a_long_name_has_short_temporary_names(tmp_path: Path, name: str) -> None:
    make(tmp_path / name)
    with create_bundle(tmp_path / name, force=True) as builder:
        fill(builder, NEW)
        cannot_create(tmp_path / name, "is being written by another process")
    assert open_bundle(tmp_path / name) == builder.bundle
    assert siblings(tmp_path / name) == []


def test_the_manifest_of_an_engine_is_read_as_the_engine_reads_it(bundle: Path, engine: Path) -> None:
    manifest = open_engine(bundle, NAME).manifest
    read = EngineFiles.read(engine)
    assert read.sources == manifest.sources
    assert read.plans == {name: plan.file for name, plan in manifest.plans.items()}
    assert {name for name in contents(engine) if not re.search(r"kernels/", name)} <= read.names(engine)
