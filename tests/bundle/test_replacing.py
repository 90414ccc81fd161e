"""What replacing a bundle deletes: what its manifest and those of its engines name, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bundle.made import CONTENT, fill, make, siblings
from tests.tensorrt.artifact import stored
from tfexport._io import atomic
from tfexport._io.strict_json import seal
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.contents import EngineFiles
from tfexport.cli import main
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
    """Expect one line before anything is written, and everything as it was."""
    before = contents(bundle.parent)
    with pytest.raises(BundleError) as caught, create_bundle(bundle, force=True):
        pytest.fail("the block must not run")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
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
def test_a_file_that_no_manifest_names_stops_it(name: str, bundle: Path, engine: Path) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("mine")
    refuses(bundle, f"holds more than a bundle: {name!r} does not belong to it; --force deletes only files")
    assert (bundle / name).read_text() == "mine"


@pytest.mark.parametrize(
    "plans", [{"encoder": {"file": "../../../thesis.tex"}}, {"../x": {"file": "x"}}, {"encoder": {"file": "."}}, []]
)
def test_an_engine_names_files_of_its_own_folder_alone(bundle: Path, engine: Path, plans: object) -> None:
    data = {"format_version": 1, "plans": plans, "sources": {}}
    (engine / "engine.json").write_bytes(seal(data))
    refuses(bundle, f"'engines/{NAME}/engine.json' does not belong to it")


@pytest.mark.parametrize("place", ["engines", f"engines/{NAME}", f"engines/{NAME}/kernels"])
def test_links_are_not_followed(place: str, bundle: Path, engine: Path) -> None:
    """What lies where a link leads belongs to somebody else."""
    outside = (bundle / place).rename(bundle.parent / "outside")
    (outside / ".x.tmp-0123456789abcdef").write_text("mine")
    (bundle / place).symlink_to(outside)
    refuses(bundle, f"{place!r} is a symbolic link, expected a plain file")
    assert (outside / ".x.tmp-0123456789abcdef").read_text() == "mine"


def test_a_file_that_comes_while_the_bundle_is_written_stops_it(bundle: Path, engine: Path) -> None:
    before = open_bundle(bundle)
    with (
        pytest.raises(BundleError, match=r"holds more than a bundle: 'notes\.txt' does not belong to it"),
        create_bundle(bundle, force=True) as builder,
    ):
        fill(builder, NEW)
        (bundle / "notes.txt").write_text("mine")
    assert (bundle / "notes.txt").read_text() == "mine"
    (bundle / "notes.txt").unlink()
    assert open_bundle(bundle) == before
    open_engine(bundle, NAME).check_plans()
    assert siblings(bundle) == []


def test_an_output_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match=r"exists; choose another name, or replace it with --force"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        fill(builder)
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "thesis.tex").write_text("years of work")
    assert (tmp_path / "bundle" / "thesis.tex").read_text() == "years of work"
    assert siblings(tmp_path / "bundle") == []


# ---- engines


def test_engines_stay(bundle: Path, engine: Path) -> None:
    before = contents(engine)
    with create_bundle(bundle, force=True) as builder:
        fill(builder, CONTENT | {"parity.json": b'{"other": 1}'})
    assert contents(engine) == before
    assert builder.stale_engines == ()
    assert siblings(bundle) == []


def test_engines_of_other_graphs_stay_and_are_called_stale(bundle: Path, engine: Path) -> None:
    before = contents(engine)
    with create_bundle(bundle, force=True) as builder:
        fill(builder, NEW)
    assert contents(engine) == before
    assert builder.stale_engines == (NAME,)
    opened = open_bundle(bundle)
    with pytest.raises(EngineError, match=r"weights\.safetensors: built with .*; build it again with: tfexport trt"):
        choose_engine(opened, NAME, stored.MACHINE)
    shown = CliRunner().invoke(main, ["inspect", str(bundle), "--json"])
    assert json.loads(shown.stdout)["engines"][NAME]["stale"] is True
    assert (
        "  stale, may not be used here: weights.safetensors: built with"
        in CliRunner().invoke(main, ["inspect", str(bundle)]).stdout
    )


def test_an_engine_that_is_being_built_is_waited_for(bundle: Path, engine: Path) -> None:
    opened = open_bundle(bundle)
    with add_engine(opened.path, "other", force=False) as folder:
        for name, data in contents(engine).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        with (
            pytest.raises(BundleError, match="engines/other is being written by another process; wait"),
            create_bundle(bundle, force=True),
        ):
            pytest.fail("the block must not run")
    make(bundle, NEW, force=True)
    open_engine(bundle, "other")


def test_an_engine_that_comes_while_the_bundle_is_written_is_not_lost(
    bundle: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = atomic.publish

    def build(*arguments: object) -> None:
        """Come after the engines were copied."""
        shutil.copytree(engine, bundle / "engines" / "other")
        publish(*arguments)

    before = open_bundle(bundle)
    with (
        pytest.raises(BundleError, match=r"the engines of .* changed while the bundle was written; run it again"),
        create_bundle(bundle, force=True) as builder,
    ):
        fill(builder, NEW)
        monkeypatch.setattr(atomic, "publish", build)
    assert open_bundle(bundle) == before
    open_engine(bundle, "other")
    assert siblings(bundle) == []


def test_what_a_killed_build_left_is_cleared(bundle: Path, engine: Path) -> None:
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
def test_a_long_name_has_short_siblings(tmp_path: Path, name: str) -> None:
    make(tmp_path / name)
    with create_bundle(tmp_path / name, force=True) as builder:
        fill(builder, NEW)
        with pytest.raises(BundleError, match="is being written by another process"), create_bundle(tmp_path / name):
            pytest.fail("the block must not run")
    assert open_bundle(tmp_path / name) == builder.bundle
    assert siblings(tmp_path / name) == []


def test_a_name_that_is_too_long_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="File name too long"), create_bundle(tmp_path / ("x" * 256)):
        pytest.fail("the block must not run")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_of_an_engine_is_read_as_the_engine_reads_it(bundle: Path, engine: Path) -> None:
    manifest = open_engine(bundle, NAME).manifest
    read = EngineFiles.read(engine)
    assert read.sources == manifest.sources
    assert read.plans == {name: plan.file for name, plan in manifest.plans.items()}
    assert {name for name in contents(engine) if not re.search(r"kernels/", name)} <= read.names(engine)
