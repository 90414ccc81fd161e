"""`load` refuses bundles with files in `engines/` that no engine lists, before it creates a session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest

import tfexport
from tests.tensorrt.artifact import stored
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.bundle.contents import check_engines, unlisted_files
from tfexport.describe import describe, inspect_path
from tfexport.errors import BundleError

NAME = "tensorrt-rtx-static-fp32"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    made = stored.make(tmp_path / "bundle")
    stored.store(made, stored.manifest(made))
    return made


@pytest.fixture
def engine(bundle: Bundle) -> Path:
    return bundle.path / "engines" / NAME


def test_an_engine_with_kernels_is_sealed(bundle: Bundle, engine: Path) -> None:
    kernels = engine / "kernels" / "1.7-L4-13.0"
    kernels.mkdir(parents=True)
    (kernels / "kernels.json").write_text("{}")
    (kernels / "encoder.kernels").write_bytes(b"x")
    (engine / "engine.json.sig").write_bytes(bytes(64))
    assert unlisted_files(bundle.path) == []
    check_engines(bundle.path)
    # Damaged plans are not reported, because other backends still run the bundle.
    (engine / "encoder.plan").write_bytes(b"damaged")
    (engine / "reorder.plan").unlink()
    assert unlisted_files(bundle.path) == []


def write(name: str) -> Callable[[Path], object]:
    def apply(engines: Path) -> None:
        (engines / name).parent.mkdir(parents=True, exist_ok=True)
        (engines / name).write_bytes(b"x")

    return apply


def damage(engines: Path) -> None:
    (engines / NAME / "engine.json").write_bytes(b"{}")


def link(engines: Path) -> None:
    shutil.move(engines / NAME / "encoder.plan", engines.parent.parent / "plan")
    (engines / NAME / "encoder.plan").symlink_to(engines.parent.parent / "plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write("notes.txt"), "'engines/notes.txt' is not listed in any engine.json"),
        (write(f"{NAME}/payload.so"), f"'engines/{NAME}/payload.so' is not listed in any engine.json"),
        (write(f"{NAME}/kernels/L4/payload.kernels"), f"'engines/{NAME}/kernels/L4/payload.kernels' is not listed"),
        (write("other/encoder.plan"), "'engines/other/encoder.plan' is not listed in any engine.json"),
        (write(".hidden/plan"), "'engines/.hidden/plan' is not listed in any engine.json"),
        (write(f".{NAME}.tmp-123/plan"), f"'engines/.{NAME}.tmp-123/plan' is not listed in any engine.json"),
        (damage, f"'engines/{NAME}/encoder.plan' is not listed in any engine.json"),
        (link, f"'engines/{NAME}/encoder.plan' is a symbolic link"),
        (lambda engines: os.mkfifo(engines / "pipe"), "'engines/pipe' is neither a file nor a directory"),
        (lambda engines: os.link(engines / NAME / "engine.json", engines / "twin"), "is a hard link (2 names)"),
    ],
)
def test_files_that_no_engine_lists_are_refused(
    bundle: Bundle, change: Callable[[Path], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    change(bundle.path / "engines")
    open_bundle(bundle.path)
    with pytest.raises(BundleError) as caught:
        tfexport.load(bundle.path)
    assert message in str(caught.value)
    assert str(caught.value).endswith("; remove it, or copy the bundle again from its source")


def test_inspect_shows_what_load_refuses(bundle: Bundle) -> None:
    write("notes.txt")(bundle.path / "engines")
    found = inspect_path(bundle.path)
    assert found["unsealed"] == ["'engines/notes.txt' is not listed in any engine.json"]
    assert "  load refuses it: 'engines/notes.txt' is not listed in any engine.json" in describe(found)


@pytest.mark.parametrize(
    "name", [f".{NAME}.lock", f".{NAME}.tmp-{'a' * 16}/x.plan", f".{NAME}.old-{'0' * 16}/engine.json"]
)
def test_temporary_files_of_writers_are_ignored(bundle: Bundle, name: str) -> None:
    write(name)(bundle.path / "engines")
    write(f"{NAME}/kernels/{name}")(bundle.path / "engines")
    assert unlisted_files(bundle.path) == []
