"""Bundles: written whole or not at all; what a failure, a full disk or a kill leaves behind."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bundle.made import CONTENT, fill, make, refused, siblings
from tfexport._io import atomic
from tfexport.bundle import bundle as bundles
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.errors import BundleError


def test_an_existing_output_is_refused_before_any_work(bundle: Path) -> None:
    with (
        pytest.raises(BundleError, match="exists; choose another name, or replace it with --force"),
        create_bundle(bundle),
    ):
        pytest.fail("the block must not run")
    (bundle.parent / "empty").mkdir()
    with pytest.raises(BundleError, match="exists"), create_bundle(bundle.parent / "empty"):
        pytest.fail("the block must not run")
    assert siblings(bundle) == ["empty"]


def test_force_replaces_a_damaged_bundle_and_an_empty_directory(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "decoder.onnx").write_bytes(b"damaged")
    make(bundle, force=True)
    (bundle.parent / "empty").mkdir()
    make(bundle.parent / "empty", force=True)


def test_force_follows_a_link(bundle: Path) -> None:
    (bundle.parent / "current").symlink_to("bundle")
    after = make(bundle.parent / "current", CONTENT | {"weights.safetensors": b"new"}, force=True)
    assert (bundle.parent / "current").is_symlink()
    assert after.path == bundle
    assert open_bundle(bundle) == after


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: None,
        lambda manifest: "{}",
        lambda manifest: "not JSON",
        lambda manifest: '{"format_version": 1, "files": {"thesis.tex": {}}}',
        lambda manifest: manifest.replace('"encoder.onnx"', '"thesis.tex"'),
        lambda manifest: manifest.replace('"format_version": 1', '"format_version": 99'),
    ],
)
def test_force_replaces_only_bundles(bundle: Path, change: Callable[[str], str | None]) -> None:
    """Only a manifest that tfexport wrote may name files to delete."""
    (bundle / "thesis.tex").write_text("years of work")
    manifest = change((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").unlink()
    if manifest is not None:
        (bundle / "manifest.json").write_text(manifest)
    with (
        pytest.raises(
            BundleError, match="is not a bundle; --force replaces only bundles; choose another name or remove"
        ),
        create_bundle(bundle, force=True),
    ):
        pytest.fail("the block must not run")
    assert (bundle / "thesis.tex").read_text() == "years of work"
    assert siblings(bundle) == []


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output, message in (
        (tmp_path / "file", "is a file, expected a new directory"),
        (tmp_path / "file" / "below", "cannot write bundle"),
        (Path("/"), "is the root of the file system"),
    ):
        with pytest.raises(BundleError, match=message), create_bundle(output, force=True):
            pytest.fail("the block must not run")
    assert (tmp_path / "file").read_text() == "x"


def test_a_failure_leaves_the_former_bundle_and_nothing_else(bundle: Path) -> None:
    before = open_bundle(bundle)
    with pytest.raises(ZeroDivisionError), create_bundle(bundle, force=True) as builder:
        fill(builder, {**CONTENT, "weights.safetensors": b"new"})
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), create_bundle(bundle.parent / "new") as builder:
        fill(builder)
        raise KeyboardInterrupt
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_an_unfinished_or_spoiled_bundle_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="was not finished"), create_bundle(tmp_path / "bundle"):
        pass
    with pytest.raises(BundleError, match=r"encoder\.onnx was changed"), create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        (builder.path / "encoder.onnx").write_bytes(CONTENT["encoder.onnx"][::-1])
    with pytest.raises(BundleError, match="'link' is a symbolic link"), create_bundle(tmp_path / "bundle") as builder:
        (builder.path / "link").symlink_to("/etc/passwd")
        fill(builder)
    with (
        pytest.raises(BundleError, match=r"graphs\.encoder is 'encoder\.onnx', which is not among"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        fill(builder, {name: data for name, data in CONTENT.items() if name != "encoder.onnx"})
    assert list(tmp_path.iterdir()) == []


def test_two_writers_exclude_one_another_until_one_is_done(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        with pytest.raises(BundleError, match="being written by another process"), create_bundle(tmp_path / "bundle"):
            pytest.fail("the block must not run")
        make(tmp_path / "other")
        assert builder.path.exists()
    open_bundle(tmp_path / "bundle")
    make(tmp_path / "bundle", force=True)


def test_of_many_writers_at_once_each_succeeds_or_says_why(tmp_path: Path) -> None:
    target, outcomes = tmp_path / "bundle", []
    make(target)

    def write(i: int) -> None:
        try:
            outcomes.append(make(target, CONTENT | {"weights.safetensors": bytes([i])}, force=True).sha256)
        except BundleError as error:
            assert "being written" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_bundle(target).sha256 in outcomes
    assert siblings(target) == []


def test_an_error_of_somebody_else_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), create_bundle(tmp_path / "bundle"):
        (tmp_path / "model.safetensors").read_bytes()
    with (
        pytest.raises(BundleError, match=r"cannot write bundle .*: No such file"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        (builder.path / "missing" / "file").write_bytes(b"")


# ---- a full disk, no permission


def test_a_full_disk_is_one_line(bundle: Path) -> None:
    before = open_bundle(bundle)
    with (
        pytest.raises(BundleError, match="No space left on device; free some space or choose another output"),
        create_bundle(bundle, force=True) as builder,
    ):
        fill(builder)
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_a_bundle_that_cannot_be_read_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "encoder.onnx")

    monkeypatch.setattr(bundles, "file_problems", denied)
    refused(bundle, f"cannot read bundle {bundle}: Permission denied (encoder.onnx); check its permissions")


# ---- killed


def run_and_die(program: str, *arguments: Path) -> None:
    """Run Python that must end by SIGKILL."""
    prelude = """
        import os, signal, sys
        from pathlib import Path
        from tests.bundle.made import CONTENT, fill, make
        from tfexport.bundle.bundle import create_bundle
        output = Path(sys.argv[1])
        def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(program)
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == -signal.SIGKILL, run.stderr


@pytest.mark.parametrize("exists", [False, True])
def test_killed_while_writing(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "bundle"
    before = make(target) if exists else None
    run_and_die(
        """
        with create_bundle(output, force=True) as builder:
            fill(builder, CONTENT | {"weights.safetensors": b"half"})
            die()
        """,
        target,
    )
    assert re.fullmatch(r"\.bundle\.lock \.bundle\.tmp-[0-9a-f]{16}", " ".join(siblings(target)))
    if before:
        assert open_bundle(target) == before
    else:
        refused(target, "there is no bundle")
    make(target, force=True)
    assert siblings(target) == []


def test_leftovers_of_the_living_and_of_other_names_stay(bundle: Path) -> None:
    others = [".bundle.tmp-mine", ".bundle2.tmp-0123456789abcdef", ".bundle.tmp-0123456789abcdeg"]
    for name in others:
        (bundle.parent / name).mkdir()
    with create_bundle(bundle.parent / "living") as living:
        fill(living)
        make(bundle, force=True)
        assert living.path.exists()
    assert siblings(bundle) == sorted([*others, "living"])


def test_a_reader_waits_for_no_writer_but_says_that_there_is_one(bundle: Path) -> None:
    shutil.move(bundle, bundle.with_name(".bundle.old-0123456789abcdef"))
    with atomic.locked(bundle):
        refused(bundle, "is being written by another process")
    open_bundle(bundle)
